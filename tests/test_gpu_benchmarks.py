"""The `gpu_` measurements of tests/benchmarks on a CPU, in small: that every arm runs, and does what the other does."""

import json
import re
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from tests.benchmarks import gpu_memory, gpu_speed
from tests.benchmarks.arms.turns import Job, Over, Turns
from tests.benchmarks.gpu_speed import to_timm
from tests.benchmarks.resident import assert_same_losses, assert_same_pixels

SMALL = Job("resnet10t", 64, 10, 8, "", device="cpu", precision="fp32", settle=1, timed=2)
SPEED = r"\d\.\d\d x \(.* rounds\); [\d,]+/s, against [\d,]+/s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_each_row_says_so() -> None:
    figures = [*gpu_speed.measure(), *gpu_memory.measure()]
    assert [(figure.verdict, figure.void) for figure in figures] == [("not measured: no GPU here", False)] * 3


def test_an_arm_waits_for_each_turn_and_times_the_batches_that_count() -> None:
    told: list[str] = []
    job = replace(SMALL, warm=2, settle=1, timed=3, turns=2)
    turns = Turns(job, lambda: told.append("waits"), told.append)
    with suppress(Over):
        for number in turns.taken(count()):
            if number in (2, 3, 6):  # what is done while nothing counts, and one of those that do
                time.sleep({2: 0.5, 3: 0.1, 6: 0.5}[number])
    ready, first, *times, second = (told[at] for at in (0, 1, 2, 4, 3))
    assert (ready, first, second, len(told)) == ("ready", "waits", "waits", 5)
    assert 0.1 <= float(times[0]) < 0.4
    assert float(times[1]) < 0.1


def test_arms_with_other_losses_or_pixels_get_no_time() -> None:
    theirs = {"losses": [3.0, 2.0, 1.0, 0.5], "steps": [1, 2, 3, 4], "pixels": [0.0, 1.0]}
    ours = {"losses": [2.5, 0.75], "steps": [2, 4], "pixels": [0.01, 1.0]}  # means of two
    assert_same_losses({"timm": theirs, "kit": ours}, 1e-6)
    assert_same_pixels({"timm": theirs, "kit": ours}, 0.02)
    with pytest.raises(AssertionError, match=r"the losses of kit differ by 4\.0e-02"):
        assert_same_losses({"timm": theirs, "kit": {**ours, "losses": [2.4, 0.75]}}, 1e-3)
    with pytest.raises(AssertionError, match="too few losses are known"):
        assert_same_losses({"timm": theirs, "kit": {**ours, "losses": [2.5], "steps": [2]}}, 1e-3)
    with pytest.raises(AssertionError, match="kit gives other pixels"):
        assert_same_pixels({"timm": theirs, "kit": ours}, 0.001)


def test_auto_is_held_against_the_largest_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_memory.bisected(10, lambda size: size <= 9) == (0, 10)
    monkeypatch.setattr(gpu_memory, "by_itself", lambda folder, job: gpu_memory.Found(96, 1080.0))
    monkeypatch.setattr(gpu_memory, "trains", lambda folder, job, memory_mb: job.batch <= 100 and memory_mb == 1080)
    figure = gpu_memory.against_truth(Path(), SMALL, 720)
    assert figure.figure == "0.960; 96, 100 train in 1,080 MiB, 101 do not; 5 fresh processes"
    assert figure.met


GIVEN = {
    "ResNet": SMALL,
    "ViT": replace(SMALL, model="test_vit", image_size=160, batch=2),
    "compiled in bf16": replace(SMALL, compile=True, precision="bf16"),
}


@pytest.mark.long
@pytest.mark.parametrize("job", GIVEN.values(), ids=GIVEN)
def test_timms_arm_and_the_kits_make_the_same_updates_of_given_batches(tmp_path: Path, job: Job) -> None:
    figure = to_timm(tmp_path, job, 1, what="", at_least=1.1)
    assert re.fullmatch(SPEED, figure.figure), figure.figure
    theirs, ours = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("timm", "kit"))
    assert len(theirs["losses"]) == 20 + 2 * 3
    assert ours["steps"] == [10, 20]


@pytest.mark.long
def test_timms_arm_and_the_kits_train_from_the_same_photographs(tmp_path: Path) -> None:
    job = gpu_speed.photo_job(tmp_path, "resnet10t", 8, workers=1, timed=2, rounds=1)
    job = replace(job, device="cpu", precision="fp32")
    figure = to_timm(tmp_path, job, 1, what="", at_least=1.5, pixels=0.2)
    assert re.fullmatch(SPEED, figure.figure), figure.figure


@pytest.mark.long
def test_auto_is_asked_for_its_size_and_fresh_processes_train_with_others(tmp_path: Path) -> None:
    job = replace(SMALL, image_size=128, batch=2)
    found = gpu_memory.by_itself(tmp_path, replace(job, global_batch=720, more=("train.memory_limit_mb=1200",)))
    assert found.budget_mb == pytest.approx(1080)
    assert 720 % found.size == 0
    assert gpu_memory.trains(tmp_path, job, 1080)
    assert not gpu_memory.trains(tmp_path, job, 100)
