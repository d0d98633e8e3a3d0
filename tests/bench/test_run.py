"""The job of a bench, really run in this process: one rank, small, each figure worked out from its samples."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from trainkit.bench.base import CONTROL, BenchRequest, Results
from trainkit.bench.beside import beside
from trainkit.bench.job import run as run_bench
from trainkit.bench.results import lines, read_results
from trainkit.cluster.ranks import NO_SECRET, RankEnv
from trainkit.cluster.signals import StopFlag
from trainkit.common.errors import RunFailedError
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import Attempt, writing
from trainkit.run.folder import BenchDir, RunDir
from trainkit.run.history import history_of

MODEL = """
from torch import nn

class Small(nn.Module):
    def __init__(self, info, most):
        super().__init__()
        self.most, self.head = most, nn.Linear(info.in_chans * info.image_size ** 2, info.num_classes)
    def forward(self, images):
        if len(images) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return self.head(images.flatten(1))

def build(info, *, most: int = 1 << 20):
    return Small(info, most)
"""


@pytest.fixture(autouse=True)
def _own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "bench_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield
    sys.modules.pop("bench_model", None)


def folder(
    tmp_path: Path, name: str, *asked: str, rounds: int = 3, updates: int | None = 2, **settings: Any
) -> BenchDir:
    given = {"model__name": "bench_model:build", **settings}  # the model before its options
    words = [f"{key.replace('__', '.')}={value}" for key, value in given.items()]
    config = load("single", [*words, "monitor.loggers=[]", "train.global_batch_size=32"]).config
    run = BenchDir(RunDir.create(tmp_path / "bench", to_yaml(config)).path)
    run.request.write_text(BenchRequest(name, "single", asked, rounds, 0.01, updates).to_json())
    return run


def measured(run: BenchDir, stop: StopFlag | None = None) -> tuple[Results, list[dict[str, Any]]]:
    with writing(Attempt.begin(run)) as writer:
        run_bench(
            run, load(str(run.config)).config, RankEnv.single(), stop or StopFlag(),
            open_run=lambda: writer, secret=NO_SECRET, beat=lambda: None,
        )  # fmt: skip
    results, records = read_results(run)
    return results, [one for one in records if one["kind"] == "sample"]


def test_batch_sizes_are_measured_up_to_the_one_that_fails(tmp_path: Path) -> None:
    results, samples = measured(folder(tmp_path, "batch-size", "16", "64", "256", "512", model__most=300))
    assert {one["arm"]: one["images"] for one in samples} == {"16": 32, "64": 128, "256": 512, CONTROL: 32}
    assert results.rows[3].failed.startswith("out of memory: DefaultCPUAllocator: can't allocate memory")
    for row, images in zip(results.rows, (32, 128, 512), strict=False):
        assert row.rates == pytest.approx([images / one["seconds"] for one in samples if one["arm"] == row.name])
    (line,) = [line for line in lines(results) if line.startswith("512 ")]
    assert "can't allocate memory" in line
    assert "the largest that ran is 256" in lines(results)[-1]


@pytest.mark.nightly
def test_the_loader_is_measured_alone_and_while_it_feeds_the_model(tmp_path: Path) -> None:
    results, samples = measured(folder(tmp_path, "loader", "0", "1", updates=3))
    assert [row.name for row in results.rows if row.rates] == ["model alone", "0 workers", "1 worker"]
    assert {one["images"] for one in samples} == {3 * 32}
    assert all("loads_per_sec" in row.extra and 0 <= row.extra["data_share"] <= 1 for row in results.rows[1:])


def test_inference_is_measured_by_batch_on_one_device(tmp_path: Path) -> None:
    results, samples = measured(folder(tmp_path, "dp-inference", "1", "32", updates=5))
    assert {one["arm"]: one["images"] for one in samples} == {"one device, 1": 5, "one device, 32": 160, CONTROL: 5}
    assert [name for name, _ in results.left_out] == ["DataParallel"]
    assert lines(results)[-1].endswith("DataParallel takes two GPUs, so there is nothing to compare it with.")


@pytest.mark.nightly
def test_runs_that_share_a_device_are_measured_beside_copies(tmp_path: Path) -> None:
    results, samples = measured(folder(tmp_path, "sharing", "1", "2", updates=3))
    assert {one["arm"]: one["images"] for one in samples} == {"1": 96, "2": 192, CONTROL: 96}
    assert [row.name for row in results.rows if row.rates] == ["1", "2"]


@pytest.mark.nightly
def test_a_copy_that_cannot_train_ends_the_others_and_says_why(tmp_path: Path) -> None:
    cpus, threads, found = os.sched_getaffinity(0), torch.get_num_threads(), set(psutil.Process().children())
    with pytest.raises(RunFailedError) as failed, beside(tmp_path / "none", [], 2):
        pytest.fail("nothing is measured without them")
    assert "3 do not train side by side" in failed.value.what
    assert "Unknown preset" in failed.value.why
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cpus, threads)
    assert set(psutil.Process().children()) == found


class Watched(StopFlag):
    """A stop that is looked for whenever the job looks for one."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look

    @property
    def requested(self) -> bool:
        return self._look()

    @requested.setter
    def requested(self, value: bool) -> None: ...


def test_the_configuration_of_an_arm_is_that_of_its_first_turn(tmp_path: Path) -> None:
    run = folder(tmp_path, "batch-size", "16")

    def spoil() -> bool:
        if run.samples.exists() and '"trial"' in run.samples.read_text():
            run.config.write_text("not: [valid")
        return False

    results, samples = measured(run, Watched(spoil))
    assert [row.failed for row in results.rows] == [""]
    assert len(samples) == 2 * 3


@pytest.mark.long
def test_the_largest_batch_is_found_where_it_is_to_be(tmp_path: Path) -> None:
    results, samples = measured(folder(tmp_path, "amp", "fp32", "bf16", train__micro_batch_size="auto", model__most=40))
    assert {row.largest for row in results.rows} == {32}  # of 2, 4, 8, ...; 64 has no room in this model
    assert results.rows[0].arm.name == "fp32"
    assert {one["images"] for one in samples} == {64}


@pytest.mark.long
def test_who_is_told_to_stop_ends_with_what_is_measured(tmp_path: Path) -> None:
    run = folder(tmp_path, "amp", "fp32", "bf16")
    soon = Watched(lambda: run.samples.exists() and run.samples.read_text().count('"sample"') >= 4)
    results, samples = measured(run, soon)
    assert len(samples) == 4
    assert results.notes[-1] == "It was told to stop after 1 of 3 rounds."
    assert results.rows[1].ratio is None
    assert history_of(run).finished  # nothing is left to go on with
