"""What a pass over samples leaves: sums that are exact, a confusion matrix, and pictures of the surest mistakes."""

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import Linear, evaluated, parts_of
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.data.base import normalize
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.inference.evaluate import evaluate_checkpoint
from trainkit.run.folder import RunDir
from trainkit.training import evaluation
from trainkit.training.evaluation import EvaluationPass, measure
from trainkit.training.tasks.classification import Classification
from trainkit.training.tasks.meter import (
    _MOST_PENDING,
    _MOST_PENDING_SCORES,
    LONGEST_SIDE,
    MOST,
    Calibration,
    Confusion,
    Meter,
    Mistakes,
    class_scores,
    confusion_json,
)
from trainkit.training.tasks.returned import losses_of

# Of 7 classes; the right one is 0. It is first, second, fifth and sixth of the scores.
LOGITS = torch.tensor([[right, 1, 2, 3, 4, 5, 6] for right in (9.0, 5.5, 2.5, 1.5)])
LABELS = torch.zeros(4, dtype=torch.int64)
LOSSES = torch.tensor([0.5, 1.0, 2.0, 4.5])
ALL = slice(None)
SPLITS = parts_of().splits
TASK = Classification(SPLITS.info, 0.0, None)
ALONE = Distributed(RankEnv.single(), torch.device("cpu"))
WHOLE = {"loss": 2.0, "acc1": 25.0, "acc5": 75.0}


def meter(*parts: slice) -> Meter:
    one = Meter(TASK, ALONE)
    add(one, *parts)
    return one


def add(one: Meter, *parts: slice) -> None:
    for part in parts:
        one.add(LOSSES[part].mean(), LOGITS[part], LABELS[part])


@pytest.mark.parametrize("parts", [[ALL], [slice(0, 1), slice(1, 4), ALL], [ALL] * (3 * _MOST_PENDING + 1)])
def test_loss_and_hits_are_means_over_samples_whatever_the_batches(parts: list[slice]) -> None:
    one = meter(*parts)
    assert len(one._pending) < _MOST_PENDING
    assert one.read() == {**WHOLE, "samples": sum(len(LABELS[part]) for part in parts)}
    assert (one.sums(), one.told, one.read()) == ([0, 0], [0], {"samples": 0}), "it starts again from zero"
    one.add(LOSSES[:2].mean(), torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), LABELS[:2])  # of three classes
    assert one.read() == {"loss": 0.75, "acc1": 50.0, "acc5": 100.0, "samples": 2}


def test_sums_that_the_ranks_have_exchanged_stand_until_something_is_added() -> None:
    one = meter(ALL)
    one.exchange(tell=2.5)
    assert (one.sums()[:2], one.told) == ([8.0, 4], [2.5])
    add(one, ALL)
    assert (one.sums()[:2], one.told) == ([16.0, 8], [0])
    one.exchange(tell=1.5)
    assert (one.read(), one.told) == ({**WHOLE, "samples": 8}, [1.5])


def test_what_is_masked_counts_nowhere_even_if_it_is_nan() -> None:
    one = meter()
    losses = torch.tensor([0.5, 1.0, float("nan"), 4.5])
    one.add_masked(losses, LOGITS, LABELS, torch.tensor([True, True, False, False]))
    assert one.read() == {"loss": 0.75, "acc1": 50.0, "acc5": 100.0, "samples": 2}


def test_sums_are_exact_where_float32_is_not() -> None:
    one = meter()
    one.go_on([1e8 + 1, 0, 2**24, 5 * 2**24])
    for loss in (0.25, 2**24, 0.5):
        one.add(torch.tensor(loss), LOGITS[:1], LABELS[:1])
    assert one.sums() == [1e8 + 1 + 2**24 + 0.75, 3, 2**24 + 3, 5 * 2**24 + 3]


def test_it_keeps_no_graph_and_not_many_large_batches() -> None:
    one = meter()
    one.add(LOSSES.mean().requires_grad_(), LOGITS.clone().requires_grad_(), LABELS)
    assert not any(tensor.requires_grad for tensor in one._pending[0])
    for _ in range(3):
        one.add(LOSSES.mean(), torch.zeros(1, _MOST_PENDING_SCORES // 2), LABELS[:1])
    assert not one._pending


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_a_score_that_is_not_finite_is_a_miss(bad: float) -> None:
    for label in range(7):
        logits = torch.full((2, 7), bad)
        logits[1] = torch.tensor([9.0, 8, 7, 6, 5, 4, 3])
        logits[1, label] = bad
        one, masked, labels = meter(), meter(), torch.full((2,), label)
        one.add(torch.tensor(1.0), logits, labels)
        masked.add_masked(torch.ones(2), logits, labels, torch.tensor([True, True]))
        assert one.read() == masked.read() == {"loss": 1.0, "acc1": 0.0, "acc5": 0.0, "samples": 2}
        logits = torch.full((1, 7), -float("inf"))
        logits[0, 3] = 1.0
        one.add(torch.tensor(1.0), logits, labels[:1])
        assert one.sums()[1:] == [1, label == 3, label == 3], "one of -inf is none of the five"


@torch.no_grad()
def by_hand() -> list[tuple[int, int, float]]:
    """Of every image of the validation: its class, the class that it is taken for, and how surely."""
    found = []
    for index in range(len(SPLITS.val)):
        image, label = SPLITS.val[index]
        logits = Linear()(normalize(SPLITS.eval_transform(image)[None], SPLITS.info))[0]
        told = int(logits.argmax())
        found.append((label, told, float(logits.softmax(0)[told])))
    return found


def _on_ranks(env: RankEnv) -> dict[str, Any]:
    with distributed(env, use_gpu=False) as dist:
        one = Meter(TASK, dist)
        one.go_on([6.0])  # of no use
        one.go_on([6.0, 2] if dist.rank else [0.0, 0])  # rank 0 alone goes on
        add(one, slice(0, 1) if dist.rank == 0 else slice(dist.rank, 4 if dist.rank == env.world_size - 1 else 2))
        read, told = one.read(tell=env.rank + 0.5), one.told
        parts = parts_of("train.global_batch_size=12", "train.micro_batch_size=2", dist=dist)
        found = measure(parts, EvaluationPass(parts.splits.val, confusion=True))
        assert found is not None
        wrong = [(item["label"], item["told"], item["confidence"]) for item in found.mistakes["raw"].read()]
        return {"read": read, "told": told, "counts": found.counts["raw"], "metrics": found.metrics, "wrong": wrong}


def test_each_sample_is_summed_counted_and_looked_at_once_by_all_ranks() -> None:
    """And each rank tells all others a number on the way."""
    images = by_hand()
    expected = sorted((item for item in images if item[0] != item[1]), key=lambda item: -item[2])
    for found in run_ranks(3, _on_ranks):
        assert (found["read"], found["told"]) == ({**WHOLE, "samples": 4}, [0.5, 1.5, 2.5])
        assert found["counts"] == Counter((label, told) for label, told, _ in images)
        assert found["metrics"] == pytest.approx(evaluated(parts_of()), rel=1e-5)
        assert found["metrics"]["acc1"] == pytest.approx(100 * (1 - len(expected) / len(images)))
        assert [names for *names, _ in found["wrong"]] == [[f"class {a}", f"class {b}"] for a, b, _ in expected]
        assert [sure for *_, sure in found["wrong"]] == pytest.approx([sure for *_, sure in expected], abs=1e-3)


def test_images_whose_scores_are_not_finite_are_told_as_no_class() -> None:
    counts, logits = Confusion(TASK, 7, ALONE), torch.zeros(4, 7)
    logits[0, 0], logits[1, 6], logits[2, 2], logits[3, 5] = float("nan"), float("inf"), 1.0, -float("inf")
    counts.add(logits, logits, torch.tensor([0, 6, 2, 1]), torch.tensor([True, True, True, False]))
    content = confusion_json(SPLITS.info, {"raw": counts.read()})
    assert content["classes"] == [*SPLITS.info.class_names, "no class: NaN"]
    assert content["raw"] == [[0, 7, 1], [2, 2, 1], [6, 7, 1]]
    assert confusion_json(SPLITS.info, {"raw": {(0, 6): 1}})["classes"] == [*SPLITS.info.class_names]


def test_the_calibration_error_is_that_of_the_paper_whatever_the_batches() -> None:
    """Guo et al., equation 3: over 15 bins, how far accuracy is from confidence, weighted by samples."""
    calibration, random = Calibration(TASK, ALONE), torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(300, 7, generator=random), torch.randint(7, (300,), generator=random)
    for part in range(0, 300, 50):
        mask = torch.ones(51) > 0
        mask[50] = False  # padding, and a row without a class
        padded, targets = (
            torch.cat([logits[part : part + 50], logits[:1]]),
            torch.cat([labels[part : part + 50], labels[:1]]),
        )
        calibration.add(padded, padded, targets, mask)
    calibration.add(logits[:1], torch.full((1, 7), float("nan")), labels[:1], torch.tensor([True]))
    sure, told = (part.numpy() for part in logits.double().softmax(1).max(1))
    expected = 0.0
    for at in range(15):
        inside = (sure > at / 15) & (sure <= (at + 1) / 15)
        if inside.any():
            off = (told[inside] == labels.numpy()[inside]).mean() - sure[inside].mean()
            expected += inside.mean() * abs(off)
    assert calibration.read() == pytest.approx(100 * expected, abs=1e-4)


def test_precision_recall_and_f1_are_scikit_learns() -> None:
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    random = torch.Generator().manual_seed(0)
    labels, told = (torch.randint(6, (200,), generator=random).tolist() for _ in range(2))
    told = [2 if each == 4 else each for each in told]  # to class 4 nothing is taken
    matrix = confusion_matrix(labels, told)
    counts = {(row, column): int(matrix[row, column]) for row in range(6) for column in range(6) if matrix[row, column]}
    expected = precision_recall_fscore_support(labels, told, zero_division=0)
    found = class_scores(counts, list("abcdef"))
    assert [row.name for row in found] == list("abcdef")
    for column, each in enumerate(expected):
        scale = 1 if column == 3 else 100
        assert [row[column + 1] for row in found] == pytest.approx((scale * each).tolist())


def test_a_matrix_that_nobody_could_look_at_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, kinds in ((7, ["raw"]), (6, [])):
        monkeypatch.setattr(evaluation, "MOST_CLASSES", most)
        found = measure(parts_of(), EvaluationPass(SPLITS.val, confusion=True))
        assert found is not None
        assert list(found.counts) == kinds


def test_the_surest_of_many_batches_are_kept_and_no_more() -> None:
    mistakes = Mistakes(TASK, ALONE)
    sureness = torch.rand(5, 20, generator=torch.Generator().manual_seed(0))
    for batch in sureness:
        logits = torch.zeros(20, 6)
        logits[:, 1] = 3 + batch
        mistakes.add(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), logits, torch.zeros(20).long(), torch.ones(20) > 0)
    largest = (3 + sureness.flatten().sort(descending=True).values[:MOST]).exp()
    found = [item["confidence"] for item in mistakes.read()]
    assert found == pytest.approx((largest / (largest + 5)).tolist(), abs=1e-4)
    assert found == [round(sure, 4) for sure in found]


def test_padding_right_answers_and_what_is_not_finite_are_no_mistakes() -> None:
    """And a large image is made small."""
    mistakes, images = Mistakes(TASK, ALONE), torch.full((5, 3, 224, 200), 7, dtype=torch.uint8)
    logits = torch.eye(5, 10) * 9
    logits[2], logits[4, 4] = float("nan"), float("inf")
    mask = torch.tensor([True, True, True, False, True])
    mistakes.add(images, logits, torch.tensor([0, 5, 5, 5, 5]), mask)
    (item,) = mistakes.read()
    assert (item["label"], item["told"]) == ("class 5", "class 1")
    with Image.open(io.BytesIO(base64.b64decode(item["png"]))) as picture:
        assert (picture.format, picture.mode, max(picture.size)) == ("PNG", "RGB", LONGEST_SIDE)
        assert picture.getpixel((5, 5)) == (7, 7, 7)


def test_a_run_leaves_counts_and_mistakes_of_its_best_as_evaluate_does(tmp_path: Path) -> None:
    """Two ranks, with an average of the weights."""
    run = RunDir(tmp_path / "run")
    run_ranks(2, train_run, run.path, "ddp", ("train.max_steps=6", "train.ema_decay=0.5"))
    files = (run.summary, run.confusion, run.mistakes("val"))
    summary, counts, found = (json.loads(file.read_text()) for file in files)
    assert (counts["split"], counts["step"]) == ("test", summary["best_step"])
    assert counts["classes"] == [str(digit) for digit in range(10)]
    for kind, prefix in (("raw", ""), ("ema", "ema_")):
        right = sum(count for label, told, count in counts[kind] if label == told)
        samples = sum(count for *_, count in counts[kind])
        assert samples == summary["test"]["samples"]
        assert 100 * right / samples == pytest.approx(summary["test"][f"{prefix}acc1"])
    assert (found["step"], found["split"]) == (summary["best_step"], "val")
    wrong = round(summary["val"]["samples"] * (1 - summary["best"]["val/acc1"] / 100))
    assert len(found["images"]) == min(wrong, MOST) > 0
    assert json.loads(run.mistakes("test").read_text())["step"] == summary["best_step"]
    run.mistakes("val").unlink()
    evaluate_checkpoint(load(str(run.config)).config, run, "best", "val")
    again = json.loads(run.mistakes("val").read_text())
    first, second = ([(item["label"], item["png"]) for item in each["images"]] for each in (found, again))
    assert first == second


class Odd(Classification):
    """A task whose methods return what somebody has made of them."""

    def __init__(self, **returned: Any) -> None:
        super().__init__(SPLITS.info, 0.0, None)
        self.returned = returned
        self.stated = ("acc1", "acc5")

    def loss(self, output: torch.Tensor, target: torch.Tensor, reduction: str) -> Any:
        return self.returned.get("loss", LOSSES[: len(target)])

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        return self.returned.get("sums", torch.ones(len(target), 2))

    def metrics(self, sums: Any, samples: int) -> Any:
        return self.returned.get("metrics", {"acc1": 1.0, "acc5": 1.0})


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"loss": torch.tensor(2.0)}, r'loss\(output, target, "none"\).*\n.*For 4 samples.*shape \[\]'),
        ({"loss": torch.ones(4, 1)}, r"shape \[4, 1\].*\n.*Pass `reduction` on.*submit again"),
        ({"loss": 2.0}, r"it returned float: 2.0"),
        ({"sums": torch.ones(4)}, r"sums\(output, target\).*\n.*shape \[4\].*\n.*\[:, None\]"),
        ({"sums": torch.ones(())}, r"shape \[\]"),
        ({"sums": 1.0}, r"it returned float: 1.0"),
        ({"metrics": {"acc1": 1.0}}, r"Odd measures no acc5.*\n.*METRICS states acc1, acc5, and it returned acc1"),
        ({"metrics": [1.0]}, r"metrics\(sums, samples\).*\n.*returned list"),
        ({"metrics": None}, r"returned NoneType"),
        ({"metrics": {"acc1": "good", "acc5": 1.0}}, r"returned dict: {'acc1': 'good'"),
        ({"metrics": {"acc1": torch.zeros((), device="meta"), "acc5": 1.0}}, r"returned dict"),
    ],
)
def test_what_a_task_of_ones_own_returns_wrongly_is_named(returned: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        add_and_read(Odd(**returned))
    assert refused.value.key == "task.name"


def add_and_read(task: Odd) -> dict[str, float]:
    one = Meter(task, ALONE)
    one.add_masked(losses_of(task, LOGITS, LABELS), LOGITS, LABELS, torch.ones(4) > 0)
    return one.read()


def test_metrics_may_be_tensors_or_numbers_of_numpy_and_more_than_are_stated() -> None:
    metrics = {"acc1": torch.tensor(50.0), "acc5": np.float32(75), "further": True}
    assert add_and_read(Odd(metrics=metrics)) == {"loss": 2.0, "acc1": 50.0, "acc5": 75.0, "further": 1.0, "samples": 4}
