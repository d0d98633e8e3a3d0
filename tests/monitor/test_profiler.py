"""Profiles of a training: at the steps that were asked for, or when somebody asks."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.parts import Linear, keeper_of, parts_of
from trainkit.common.accelerators import NVIDIA
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.monitor import profiler as module
from trainkit.monitor.profiler import ON_REQUEST, Profiler, snapshot_on_oom
from trainkit.run.folder import RunDir
from trainkit.training.loop import train
from trainkit.training.progress import Progress
from trainkit.training.recorder import Instruments

FEW = ("train.epochs=5", "checkpoint.every_epochs=1000", "train.eval_every_epochs=1000", "monitor.log_every=100")


def trained(folder: Path, steps: tuple[int, int] | None, asks: Any = None) -> None:
    """15 updates of a run, with a profiler; its model calls ``asks(profiler, number)`` in each."""

    class Asking(Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if asks is not None and self.training:
                asks(profiler, len(self.calls) // 2 + 1)
            return super().forward(images)

    parts = parts_of(*FEW, model=Asking())
    plain = keeper_of(parts, folder, Progress())
    profiler = Profiler(plain.writer.run, steps, is_main=True)
    keeper = replace(plain, instruments=Instruments(profiler=profiler))
    train(parts, keeper, lambda: False)
    profiler.close(keeper.progress.step)


def traced(folder: Path) -> dict[str, int]:
    """Name of each profile, and how many updates it shows."""
    found = {}
    for file in sorted((folder / "profile").glob("*.json.gz")):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        steps = [event for event in events if str(event.get("name", "")).startswith("Optimizer.step")]
        found[file.name.removesuffix(".json.gz")] = len(steps)
        assert "aten::addmm" in file.with_name(file.name.replace(".json.gz", ".txt")).read_text()
    return found


@pytest.mark.parametrize(
    ("steps", "profiles"),
    [
        ((3, 5), {"steps-00000003-00000005-rank-0": 2}),
        ((13, 99), {"steps-00000013-00000015-rank-0": 2}),  # a run that ends in between
    ],
)
def test_the_updates_that_were_named_are_profiled_and_no_others(
    tmp_path: Path, steps: tuple[int, int] | None, profiles: dict[str, int]
) -> None:
    trained(tmp_path / "run", steps)
    assert traced(tmp_path / "run") == profiles


def test_on_request_the_next_updates_are_profiled_once_with_rare_records_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(profiler: Profiler, update: int) -> None:
        if update == 3:
            (tmp_path / "run" / "PROFILE").touch()

    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    trained(tmp_path / "run", None, asks)
    assert traced(tmp_path / "run") == {f"steps-00000003-{3 + ON_REQUEST:08}-rank-0": ON_REQUEST}
    assert not (tmp_path / "run" / "PROFILE").exists()


def test_training_outlives_a_profile_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def asks(profiler: Profiler, update: int) -> None:
        (tmp_path / "run" / "profile").touch()  # a file where the folder should be

    trained(tmp_path / "run", (3, 5), asks)
    assert "No profile: NotADirectoryError" in capfd.readouterr().err


def test_steps_that_are_no_window_are_refused() -> None:
    assert load("single", ["monitor.profile_steps=[0,5]"]).config.monitor.profile_steps == (0, 5)
    for steps in ("[25,20]", "[5,5]", "[-1,5]", "[1]"):
        with pytest.raises(UserError, match="profile_steps"):
            load("single", [f"monitor.profile_steps={steps}"])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("too small"), ValueError("another")])
def test_when_memory_is_too_small_there_is_a_snapshot_of_it(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).write_text("snapshot"))
    with pytest.raises(RuntimeError) as raised, snapshot_on_oom(RunDir(tmp_path), 3, NVIDIA, history=False):
        raise RuntimeError("for the user") from error
    assert raised.value.__cause__ is error
    found = [file.name for file in tmp_path.rglob("*.pickle")]
    assert found == (["oom-rank-3.pickle"] if isinstance(error, torch.OutOfMemoryError) else [])
