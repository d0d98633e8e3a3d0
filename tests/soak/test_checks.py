"""The soak finds what it is there to find: in a run folder that was tampered with, each fault is said."""

import json
import random
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.checkpoint import reading
from tests.soak import checks
from tests.soak.cluster import Cluster
from tests.soak.strikes import KINDS, MOMENTS, SCHEDULERS, bag
from trainkit.run.folder import RunDir

STEPS = 20


def write(run: RunDir, step: int, *, weight: float = 1.0, images: int = 0) -> None:
    tensors = {"model": {"weight": torch.tensor([weight, step])}, "optimizer": {"moment": torch.tensor([step])}}
    progress = {"step": step, "images": images or 64 * step, "train_seconds": random.random()}
    reading.write(run.checkpoints, step, tensors, {"progress": progress})


def train_line(step: int, loss: float = 0.5) -> str:
    return json.dumps({"time": random.random(), "step": step, "split": "train", "loss": loss, "images_per_sec": 3.0})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that nobody has interrupted."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "whole")
    run.path.mkdir()
    write(run, 10)
    write(run, 20)
    lines = [train_line(step) for step in range(1, STEPS + 1)]
    lines += [json.dumps({"step": STEPS, "split": split, "acc1": 90.0}) for split in ("val", "test")]
    run.metrics.write_text("\n".join(lines) + "\n")
    events = [{"event": "started", "attempt": 0, "step": 0}, {"event": "saved", "attempt": 0, "step": 20}]
    events += [{"event": "ended", "attempt": 0, "state": "COMPLETED"}]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    run.summary.write_text('{"outcome": "finished"}')
    return run


@pytest.fixture
def run(whole: RunDir, tmp_path: Path) -> RunDir:
    """A copy of it, to tamper with."""
    return RunDir(Path(shutil.copytree(whole.path, tmp_path / "soak", symlinks=True)))


def said(run: RunDir, whole: RunDir) -> str:
    return "; ".join([*checks.faults(run, whole, STEPS), *checks.left_behind(run, Cluster(run.path, {}, (), ()))])


def test_a_run_that_is_as_if_nothing_had_happened_has_no_fault(run: RunDir, whole: RunDir) -> None:
    repeated = "".join(train_line(step) + "\n" for step in range(11, STEPS + 1))
    run.metrics.write_text(run.metrics.read_text() + '{"step": 7, "spl\n' + repeated)
    assert said(run, whole) == "", "one interval was done twice after a kill that has torn a line"


def lose_a_step(run: RunDir) -> None:
    run.metrics.write_text(run.metrics.read_text().replace('"step": 13, ', '"step": 12, '))


def repeat_too_much(run: RunDir) -> None:
    more = "".join(train_line(step) + "\n" for step in range(STEPS + 1))
    run.metrics.write_text(run.metrics.read_text() + more)


def halve_a_checkpoint(run: RunDir) -> None:
    file = run.checkpoints / "step-00000010" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def say_once_more(line: str) -> Callable[[RunDir], object]:
    return lambda run: run.events.write_text(run.events.read_text() + line + "\n")


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda run: write(run, 20, weight=2.0), "model.safetensors is not that"),
        (lambda run: write(run, 20, images=7), "its progress is"),
        (lose_a_step, r"missing: \[13\]"),
        (lambda run: run.metrics.write_text(run.metrics.read_text().replace("90.0", "89.0")), "val metrics differ"),
        (repeat_too_much, "21 updates were done twice from step 0 on"),
        (halve_a_checkpoint, "step 10 counts as whole: model.safetensors has"),
        (say_once_more('{"event": "started", "attempt": 1, "step": 10}'), "step 10 though 20 was saved"),
        (say_once_more('{"event": "ended", "attempt": 1, "state": "COMPLETED"}'), "completed 2 times"),
        (lambda run: run.summary.write_text('{"outcome": "preempted"}'), "summary"),
        (lambda run: (run.checkpoints / ".step-00000017.partial").mkdir(), "partial is left"),
        (lambda run: run.lease.write_text("{}"), "lease.json is left"),
    ],
)
def test_a_fault_is_said(run: RunDir, whole: RunDir, tamper: Callable[[RunDir], object], words: str) -> None:
    tamper(run)
    assert re.search(words, said(run, whole)), said(run, whole)


def test_each_kind_comes_once_before_any_comes_again() -> None:
    strikes = list(islice(bag(random.Random(1), KINDS), 3 * len(KINDS)))
    assert {strike.kind for strike in strikes[: len(KINDS)]} == set(KINDS)
    assert {(strike.kind, strike.moment) for strike in strikes} == {(a, b) for a in KINDS for b in MOMENTS}
    assert {(strike.kind, strike.scheduler) for strike in strikes} == {(a, b) for a in KINDS for b in SCHEDULERS}
