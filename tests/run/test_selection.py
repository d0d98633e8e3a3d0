import json
import os
import time
from pathlib import Path

import pytest

from trainkit.common import jsonl
from trainkit.common.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.run.labels import say
from trainkit.run.selection import Selection, best_first, measured, presets_of, seconds_in, states_in


def make(folder: Path, *words: str) -> RunDir:
    run = RunDir.create(folder, "seed: 0\n")
    run.manifest.write_text(json.dumps({"command": ["python", "-m", "jobs.submit", *words]}))
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make(tmp_path / "ddp-0001", "ddp", "optim.lr=1")


def val(run: RunDir, **values: float | None) -> None:
    for step, value in enumerate(values.values()):
        jsonl.append_jsonl(run.metrics, {"split": "val", "step": step, "acc1": value, "loss": 1.0 + step})


def test_ages_have_a_unit() -> None:
    assert [seconds_in(text) for text in ("90min", "12h", "7d", "1.5w")] == [5400, 43200, 604800, 907200]
    for text in ("7", "d", "7 days", "-1d", "1m"):
        with pytest.raises(UserError):
            seconds_in(text)


def test_failed_is_every_state_in_which_a_run_has_failed() -> None:
    assert {"FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"} <= states_in("failed")
    assert states_in("cancelled,node_fail,not submitted") == {"CANCELLED", "NODE_FAIL", "NOT SUBMITTED"}
    with pytest.raises(UserError) as caught:
        states_in("faild")
    assert "failed" in caught.value.fix


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ddp", "optim.lr=1"], {"ddp"}),
        (["--again", "configs/mine.yaml"], {"configs/mine.yaml", "mine"}),
        (["--name", "fsdp", "ddp"], {"ddp"}),
        ([], set()),
    ],
)
def test_the_preset_is_that_of_the_command_line(tmp_path: Path, words: list[str], found: set[str]) -> None:
    assert presets_of(make(tmp_path / "run", *words)) == found


def test_a_run_has_all_that_is_asked_for(run: RunDir) -> None:
    say(run, tags=["paper", "v2"])
    assert Selection(preset="ddp", tags=["paper", "v2"], since=60).takes(run)
    assert not Selection(preset="fsdp").takes(run)
    assert not Selection(tags=["paper", "v3"]).takes(run)
    os.utime(run.config, (time.time() - 1000,) * 2)
    assert not Selection(since=999).takes(run)
    assert Selection(older=999).takes(run)
    run.events.touch()
    assert not Selection(older=999).takes(run), "something happened to it since"


def test_the_best_validation_counts_and_the_newer_of_a_step(run: RunDir) -> None:
    val(run, a=50.0, b=70.0, c=60.0, d=None)
    assert (measured(run, "val"), measured(run, "acc1"), measured(run, "val/loss")) == (70.0, 70.0, 1.0)
    jsonl.append_jsonl(run.metrics, {"split": "val", "step": 1, "acc1": 55.0})
    assert measured(run, "val/acc1") == 60.0
    assert measured(run, "test/acc1") is None
    with pytest.raises(UserError):
        measured(run, "validation/acc1")


def test_the_best_is_the_lowest_of_a_loss(tmp_path: Path) -> None:
    runs = [make(tmp_path / name) for name in "abc"]
    assert best_first({runs[0]: 1.0, runs[1]: None, runs[2]: 2.0}, "val/acc1") == [runs[2], runs[0], runs[1]]
    assert best_first({runs[0]: 1.0, runs[1]: None, runs[2]: 2.0}, "val/loss") == [runs[0], runs[2], runs[1]]


def test_a_metric_that_no_run_has_is_a_mistake(run: RunDir) -> None:
    val(run, a=50.0)
    with pytest.raises(UserError) as caught:
        best_first({run: measured(run, "val/acc2")}, "val/acc2")
    assert "val/acc1" in caught.value.fix
