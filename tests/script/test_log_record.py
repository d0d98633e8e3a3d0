"""Records of a script: by its own words, by its event files, and what a sweep makes of them."""

import json
from pathlib import Path

import pytest

from trainkit.common.errors import UserError
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import PRUNED, PRUNING, RunDir
from trainkit.run.metrics import describe_names, read_metrics, task_metrics
from trainkit.script.event_files import EventFiles, named
from trainkit.script.log_record import log, write_record


def run_at(path: Path) -> RunDir:
    return RunDir.create(path, to_yaml(load("script").config))


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """This process is rank 0 of it."""
    found = Attempt.begin(run_at(tmp_path / "run"))
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    return found


class Tensor:
    """As libraries have them."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def item(self) -> float:
        if len(self.values) > 1:
            raise ValueError("of several elements")
        return self.values[0]


def test_a_record_takes_numbers_of_any_library(attempt: Attempt) -> None:
    log(step=Tensor(3), loss=Tensor(0.5), psnr=float("inf"), note="warm")  # type: ignore[arg-type]
    (record,) = read_metrics(attempt.run)
    assert {key: record[key] for key in ("step", "split", "loss", "psnr", "note")} == {
        "step": 3, "split": "train", "loss": 0.5, "psnr": None, "note": "warm"
    }  # fmt: skip


@pytest.mark.parametrize(
    "record", [{"step": -1}, {"step": 0.5}, {"step": 1, "split": "all"}, {"step": 1, "loss": Tensor(1, 2)}]
)
def test_what_is_no_record_is_refused(attempt: Attempt, record: dict[str, object]) -> None:
    with pytest.raises(UserError):
        log(**record)  # type: ignore[arg-type]
    assert not attempt.run.metrics.exists()


def test_metrics_are_described_as_they_come(attempt: Attempt) -> None:
    """Of errors less is better; the first headline stays."""
    describe_names(attempt.run, (), "psnr")
    log(step=1, loss=1.0, lr=0.1)
    log(step=1, split="val", psnr=30.0, fid=12.0)
    found = task_metrics(attempt.run)
    assert found.headline == "psnr"
    assert {name: metric.higher_is_better for name, metric in found.metrics.items()} == {
        "loss": False, "psnr": True, "fid": False
    }  # fmt: skip


def test_a_run_that_is_behind_its_sweep_is_told_to_end(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text("[]")
    (sweep / PRUNING).write_text(json.dumps({"eta": 2}))
    attempts = [Attempt.begin(run_at(sweep / str(index))) for index in range(3)]
    for loss, attempt in zip((1.0, 2.0, 0.5), attempts, strict=True):
        write_record(attempt, 10, "val", {"loss": loss})
    assert [bool(PRUNED.read(attempt.logs)) for attempt in attempts] == [False, True, False]
    assert [len(read_events(attempt.run, "pruned")) for attempt in attempts] == [0, 1, 0]


@pytest.mark.parametrize(
    ("tag", "meant"),
    [
        ("Loss/train", ("train", "loss")),
        ("val/acc1", ("val", "acc1")),
        ("valid_loss", ("val", "loss")),
        ("eval/top-5", ("val", "top_5")),
        ("lr", ("train", "lr")),
        ("train", ("train", "train")),
    ],
)
def test_a_tag_of_tensorboard_names_split_and_metric(tag: str, meant: tuple[str, str]) -> None:
    assert named(tag) == meant


@pytest.mark.nightly
def test_event_files_below_a_run_are_its_records(attempt: Attempt) -> None:
    """Each event once; and none of them where the script writes records by itself."""
    from torch.utils.tensorboard import SummaryWriter

    files = EventFiles(attempt)
    writer = SummaryWriter(str(attempt.run.path / "tb"))
    for step in (1, 2):
        writer.add_scalar("Loss/train", 1 / step, step)
        writer.flush()
        files.look(now=True)
    writer.add_scalar("val/acc1", 90.0, 2)
    writer.close()
    files.look(now=True)
    files.look(now=True)
    found = [
        (record["step"], record["split"], record.get("loss"), record.get("acc1"))
        for record in read_metrics(attempt.run)
    ]
    assert found == [(1, "train", 1.0, None), (2, "train", 0.5, None), (2, "val", None, 90.0)]
    log(step=3, loss=0.1)
    writer = SummaryWriter(str(attempt.run.path / "tb2"))
    writer.add_scalar("Loss/train", 7.0, 4)
    writer.close()
    files.look(now=True)
    assert [record["step"] for record in read_metrics(attempt.run)] == [1, 2, 2, 3]
