"""The images that are told wrong most surely."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import Linear, parts_of
from trainkit.config.loading import load
from trainkit.data.base import normalize
from trainkit.distributed.process_group import distributed
from trainkit.inference import evaluate_checkpoint
from trainkit.ranks.env import RankEnv
from trainkit.run.folder import RunDir
from trainkit.tasks.meter import LONGEST_SIDE, MOST, Mistakes
from trainkit.training.measurement import evaluate

TASK = parts_of().task
Told = tuple[str, str, float]


@torch.no_grad()
def by_hand() -> list[Told]:
    """Class, class that it was taken for and probability of every image that is told wrong, the surest first."""
    parts = parts_of()
    found = []
    for index in range(len(parts.splits.val)):
        image, label = parts.splits.val[index]
        logits = Linear()(normalize(parts.splits.eval_transform(image)[None], parts.splits.info))[0]
        if (told := int(logits.argmax())) != label:
            found.append((f"class {label}", f"class {told}", float(logits.softmax(0)[told])))
    return sorted(found, key=lambda item: -item[2])


def _measured(env: RankEnv) -> list[Told]:
    with distributed(env, use_gpu=False) as dist:
        parts = parts_of("train.global_batch_size=12", "train.micro_batch_size=2", dist=dist)
        mistakes = Mistakes(TASK)
        evaluate(parts, parts.splits.val, mistakes=mistakes)
        return [(item["label"], item["told"], item["confidence"]) for item in mistakes.read(dist)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_they_are_the_surest_of_the_whole_split_on_any_number_of_ranks(world_size: int) -> None:
    expected = by_hand()
    for found in run_ranks(world_size, _measured):
        assert [names for *names, _ in found] == [names for *names, _ in expected]
        assert [sure for *_, sure in found] == pytest.approx([sure for *_, sure in expected], abs=1e-3)


def test_the_surest_of_many_batches_are_kept_and_no_more() -> None:
    mistakes, parts = Mistakes(TASK), parts_of()
    sureness = torch.rand(5, 20, generator=torch.Generator().manual_seed(0))
    for batch in sureness:
        logits = torch.zeros(20, 6)
        logits[:, 1] = 3 + batch
        mistakes.add(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), logits, torch.zeros(20).long(), torch.ones(20) > 0)
    found = [item["confidence"] for item in mistakes.read(parts.dist)]
    largest = (3 + sureness.flatten().sort(descending=True).values[:MOST]).exp()
    assert found == pytest.approx((largest / (largest + 5)).tolist(), abs=1e-4)


def test_padding_right_answers_and_what_is_not_finite_are_no_mistakes() -> None:
    mistakes, images = Mistakes(TASK), torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    logits = torch.eye(4, 10) * 9
    logits[2] = float("nan")
    mistakes.add(images, logits, torch.tensor([0, 5, 5, 5]), torch.tensor([True, True, True, False]))
    found = mistakes.read(parts_of().dist)
    assert [(item["label"], item["told"]) for item in found] == [("class 5", "class 1")]


def test_large_images_are_made_small() -> None:
    mistakes = Mistakes(TASK)
    images = torch.full((1, 3, 224, 200), 7, dtype=torch.uint8)
    mistakes.add(images, torch.eye(1, 10), torch.tensor([3]), torch.tensor([True]))
    (item,) = mistakes.read(parts_of().dist)
    with Image.open(io.BytesIO(base64.b64decode(item["png"]))) as picture:
        assert (picture.format, picture.mode, max(picture.size)) == ("PNG", "RGB", LONGEST_SIDE)
        assert picture.getpixel((5, 5)) == (7, 7, 7)


def test_a_run_leaves_those_of_its_best_weights_and_evaluating_it_makes_them_anew(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run_ranks(2, train_run, run.path, "ddp", ("train.max_steps=6",))
    summary, found = (json.loads(file.read_text()) for file in (run.summary, run.mistakes("val")))
    assert (found["step"], found["split"]) == (summary["best_step"], "val")
    wrong = round(summary["val"]["samples"] * (1 - summary["best"]["val/acc1"] / 100))
    assert len(found["images"]) == min(wrong, MOST) > 0
    assert json.loads(run.mistakes("test").read_text())["step"] == summary["best_step"]
    run.mistakes("val").unlink()
    evaluate_checkpoint(load(str(run.config)).config, run, "best", "val")
    again = json.loads(run.mistakes("val").read_text())
    assert [(item["label"], item["png"]) for item in again["images"]] == [
        (item["label"], item["png"]) for item in found["images"]
    ]


def test_images_whose_scores_are_not_finite_have_no_surest_class() -> None:
    mistakes, parts = Mistakes(TASK), parts_of()
    logits = torch.zeros(3, 7)
    logits[0], logits[1, 4], logits[2, 1] = float("nan"), float("inf"), 5.0
    mistakes.add(torch.zeros(3, 3, 4, 4, dtype=torch.uint8), logits, torch.tensor([1, 2, 3]), torch.ones(3).bool())
    assert [(item["label"], item["told"]) for item in mistakes.read(parts.dist)] == [("class 3", "class 1")]
