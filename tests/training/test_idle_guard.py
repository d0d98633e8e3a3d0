"""The guard of idle GPUs: what it counts, what it says, and that the run is not started again."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainkit.cluster.signals import StopFlag
from trainkit.data import order
from trainkit.recovery.retries import budget_spent
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import RunDir
from trainkit.training import evaluation
from trainkit.training.idle_guard import IdleGuard, doing_of

BUSY = {"index": 0, "util_percent": 70}
IDLE = {"index": 1, "util_percent": 0}
SILENT = {"index": 1}


class Watched:
    """A guard with a patience of two minutes, and a clock that the test turns."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt = Attempt.begin(RunDir.create(folder / "run", "{}"))
        self.stop = StopFlag()
        self.now = 0.0
        self.doing = "waited for data"
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.guard = IdleGuard(2.0, self.attempt, "n1", self.stop, lambda: self.doing)
        self.guard.has_started = True

    def looks(self, gpu: dict[str, Any], *, times: int, seconds: float = 10.0) -> None:
        for _ in range(times):
            self.now += seconds
            self.guard.look([BUSY, gpu])


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_a_gpu_that_did_nothing_for_so_long_ends_the_run(watched: Watched) -> None:
    watched.looks(IDLE, times=11)
    assert not watched.stop.requested
    watched.looks(IDLE, times=1)
    assert watched.stop.signals == ["IDLE"]
    (event,) = read_events(watched.attempt.run, "gpu_idle")
    assert (event["gpus"], event["host"], event["doing"]) == ([1], "n1", "waited for data")


def test_such_a_run_is_not_started_again(watched: Watched) -> None:
    assert budget_spent(watched.attempt.run) == ""
    watched.looks(IDLE, times=12)
    assert "GPU 1 of n1 did nothing for 2 minutes" in budget_spent(watched.attempt.run)


def test_one_that_is_resumed_has_its_patience_back(watched: Watched) -> None:
    watched.looks(IDLE, times=12)
    watched.attempt.ended("FAILED")
    Attempt.begin(watched.attempt.run)
    assert budget_spent(watched.attempt.run) == ""


def test_what_the_rank_did_most_of_the_time_is_told(watched: Watched) -> None:
    watched.looks(IDLE, times=3)
    watched.doing = "validated"
    watched.looks(IDLE, times=9)
    assert read_events(watched.attempt.run, "gpu_idle")[0]["doing"] == "validated"


@pytest.mark.parametrize("gpu", [{"index": 1, "util_percent": 1}, SILENT], ids=["it works", "its driver does not say"])
def test_a_reading_that_is_not_zero_begins_the_count_anew(gpu: dict[str, Any], watched: Watched) -> None:
    watched.looks(IDLE, times=11)
    watched.looks(gpu, times=1)
    watched.looks(IDLE, times=11)
    assert not watched.stop.requested


def test_a_start_does_not_count(watched: Watched) -> None:
    watched.guard.has_started = False
    watched.looks(IDLE, times=40)
    watched.guard.has_started = True
    watched.looks(IDLE, times=11)
    assert not watched.stop.requested


def test_time_in_which_the_process_was_stopped_does_not_count(watched: Watched) -> None:
    watched.looks(IDLE, times=1, seconds=5000.0)
    assert not watched.stop.requested


@pytest.mark.parametrize(
    ("module", "words"), [(order, "waited for data"), (evaluation, "validated"), (time, "computed on the CPU")]
)
def test_what_a_thread_does_is_told_by_the_file_that_it_is_in(
    module: ModuleType, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = getattr(module, "__file__", "elsewhere.py")
    scope: dict[str, Any] = {"here": lambda: __import__("threading").get_ident()}
    exec(compile("def ask(doing): return doing(here())", place, "exec"), scope)
    ask: Callable[[Callable[[int], str]], str] = scope["ask"]
    assert ask(doing_of) == words
