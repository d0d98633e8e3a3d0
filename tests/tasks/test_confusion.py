"""Which class is taken for which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import Linear, parts_of
from trainkit.data.base import normalize
from trainkit.distributed.process_group import distributed
from trainkit.ranks.env import RankEnv
from trainkit.tasks.meter import NO_CLASS, Confusion, confusion_json
from trainkit.training import measurement
from trainkit.training.measurement import evaluate, measure


def by_hand() -> dict[tuple[int, int], int]:
    parts = parts_of()
    pairs: dict[tuple[int, int], int] = {}
    for index in range(len(parts.splits.val)):
        image, label = parts.splits.val[index]
        told = int(Linear()(normalize(parts.splits.eval_transform(image)[None], parts.splits.info)).argmax())
        pairs[label, told] = pairs.get((label, told), 0) + 1
    return pairs


def _counted(env: RankEnv) -> tuple[dict[tuple[int, int], int], float]:
    with distributed(env, use_gpu=False) as dist:
        parts = parts_of("train.global_batch_size=12", "train.micro_batch_size=2", dist=dist)
        counts = Confusion(parts.splits.info.num_classes, dist)
        result = evaluate(parts, parts.splits.val, confusion=counts)
        assert result is not None
        return dict(counts.read()), result["acc1"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_sample_is_counted_once_on_any_number_of_ranks(world_size: int) -> None:
    for pairs, acc1 in run_ranks(world_size, _counted):
        assert pairs == by_hand()
        assert acc1 == pytest.approx(
            100 * sum(count for (own, told), count in pairs.items() if own == told) / sum(pairs.values())
        )


def test_images_whose_scores_are_not_finite_are_told_as_no_class() -> None:
    parts = parts_of()
    counts, logits = Confusion(7, parts.dist), torch.zeros(4, 7)
    logits[0, 0], logits[1, 6], logits[2, 2], logits[3, 5] = float("nan"), float("inf"), 1.0, -float("inf")
    counts.add(parts.task.taken_for(logits), torch.tensor([0, 6, 2, 1]), torch.tensor([True, True, True, False]))
    found = counts.read()
    assert found == {(0, 7): 1, (6, 7): 1, (2, 2): 1}
    content = confusion_json(parts.splits.info, {"raw": found})
    assert content["classes"] == [*parts.splits.info.class_names, NO_CLASS]
    assert content["raw"] == [[0, 7, 1], [2, 2, 1], [6, 7, 1]]
    assert confusion_json(parts.splits.info, {"raw": {(0, 6): 1}})["classes"] == [*parts.splits.info.class_names]


def test_a_matrix_that_nobody_could_look_at_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of()
    found = measure(parts, parts.splits.val, confusion=True)
    assert found is not None
    assert list(found.counts) == ["raw"]
    monkeypatch.setattr(measurement, "MOST_CLASSES", 6)
    found = measure(parts, parts.splits.val, confusion=True)
    assert found is not None
    assert not found.counts


def test_a_run_leaves_the_counts_of_both_weights_on_the_test_images(tmp_path: Path) -> None:
    run_ranks(2, train_run, tmp_path / "run", "ddp", ("train.max_steps=6", "train.ema_decay=0.5"))
    content, summary = (
        json.loads((tmp_path / "run" / name).read_text()) for name in ("confusion.json", "summary.json")
    )
    assert (content["split"], content["step"]) == ("test", summary["best_step"])
    assert content["classes"] == [str(digit) for digit in range(10)]
    for kind, prefix in (("raw", ""), ("ema", "ema_")):
        counts = torch.zeros(10, 10, dtype=torch.int64)
        for label, told, count in content[kind]:
            counts[label, told] = count
        assert counts.sum() == summary["test"]["samples"]
        assert 100 * counts.trace() / counts.sum() == pytest.approx(summary["test"][f"{prefix}acc1"])
