"""What is not finite never reaches the weights, is written down, and never ends as a success."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks
from tests.training.parts import Formats, Linear, parts_of
from tests.training.poisoned import BATCH, PER_EPOCH, SIZE, train_and_tell
from trainkit.data import draws
from trainkit.data.base import Batch, normalize
from trainkit.data.order import global_batch
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training import update
from trainkit.training.precision import Stepped
from trainkit.training.update import DivergedError, NonFinite, Update, Updater

PLAIN = ("optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0")
IMAGES = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8) % 7
KEYS = draws.keys(0, 0, torch.arange(8))


def micro_batches(size: int = 4) -> Any:
    columns = (torch.split(column, size) for column in (IMAGES, LABELS, KEYS))
    return (Batch(*parts) for parts in zip(*columns, strict=True))


def updated(*overrides: str, lr: float = 0.5, seed: int = 0, model: nn.Module | None = None) -> torch.Tensor:
    """By how much one update of the global batch moves the weights."""
    parts = parts_of(*PLAIN, *overrides, model=model)
    weight = next(parts.model.parameters())
    before = weight.detach().clone()
    Updater(parts)(micro_batches(parts.micro_batch_size), lr=lr, seed=seed)
    return weight.detach() - before


def by_hand(**options: Any) -> torch.Tensor:
    """The gradient of the loss's mean over the global batch."""
    model = Linear()
    logits = model(normalize(IMAGES, parts_of().splits.info))
    if options.pop("binary", False):
        functional.binary_cross_entropy_with_logits(logits, functional.one_hot(LABELS, 7).float()).backward()
    else:
        functional.cross_entropy(logits, LABELS, **options).backward()
    assert model.layer.weight.grad is not None
    return model.layer.weight.grad


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("train.label_smoothing=0", {}),
        ("train.label_smoothing=0.3", {"label_smoothing": 0.3}),
        ("train.loss=bce", {"binary": True}),
        ("train.class_weights=[5, 1, 0.25, 2, 1, 3, 0.5]", {"weight": torch.tensor([5, 1, 0.25, 2, 1, 3, 0.5])}),
    ],
    ids=["plain", "smooth", "binary", "weighted"],
)
@pytest.mark.parametrize("micro_batch_size", [8, 4, 2])
def test_an_update_follows_the_global_batchs_mean(micro_batch_size: int, setting: str, options: dict[str, Any]) -> None:
    moved = updated(setting, f"train.micro_batch_size={micro_batch_size}", lr=0.5)
    assert torch.allclose(moved, -0.5 * by_hand(**dict(options)), atol=1e-6)


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2])
def test_an_update_tells_its_loss_its_norm_and_every_sample_it_has_seen(micro_batch_size: int) -> None:
    """Gradients are clipped on request."""
    parts = parts_of(*PLAIN, f"train.micro_batch_size={micro_batch_size}", "train.grad_clip_norm=0.25")
    before = [parameter.detach().clone() for parameter in parts.model.parameters()]
    updater = Updater(parts)
    update = updater(micro_batches(micro_batch_size), lr=1.0, seed=0)
    logits = Linear()(normalize(IMAGES, parts.splits.info))
    loss = pytest.approx(functional.cross_entropy(logits, LABELS).item(), rel=1e-5)
    assert update.loss.item() == loss
    assert update.stepped.norm is not None
    assert update.stepped.nonfinite.item() == 0.0
    moved = [parameter.detach() - old for parameter, old in zip(parts.model.parameters(), before, strict=True)]
    assert torch.cat([part.flatten() for part in moved]).norm().item() == pytest.approx(0.25, rel=1e-4)
    measured = updater.meter.read()
    assert measured["samples"] == 8
    assert measured["loss"] == loss
    assert measured["acc1"] == 100 * (logits.argmax(1) == LABELS).float().mean().item()


def test_nothing_of_an_update_is_left_for_the_next() -> None:
    parts = parts_of(*PLAIN)
    update = Updater(parts)
    weight = next(parts.model.parameters())
    update(micro_batches(), lr=0.5, seed=0)
    once = weight.detach().clone()
    update(micro_batches(), lr=0.0, seed=0)
    assert torch.equal(weight, once)


class Exchanges:
    """A strategy that notes when gradients would be exchanged."""

    def __init__(self) -> None:
        self.asked: list[tuple[nn.Module, bool]] = []

    def parallelize(self, model: nn.Module) -> nn.Module:
        return model

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        self.asked.append((model, enabled))
        return nullcontext()


def test_gradients_are_exchanged_once_with_the_last_micro_batch() -> None:
    strategy = Exchanges()
    parts = replace(parts_of("train.micro_batch_size=2"), strategy=strategy)
    Updater(parts)(micro_batches(2), lr=0.5, seed=0)
    assert strategy.asked == [(parts.model, False)] * 3 + [(parts.model, True)]


def test_it_multiplies_in_the_asked_format_and_takes_the_loss_in_fp32() -> None:
    model = Formats()
    parts = parts_of("train.precision=bf16", model=model)
    update = Updater(parts)
    update(micro_batches(), lr=0.0, seed=0)
    assert model.formats == {torch.bfloat16}
    with torch.no_grad(), parts.precision.autocast():
        exact = functional.cross_entropy(model(normalize(IMAGES, parts.splits.info)).float(), LABELS)
    assert update.meter.read()["loss"] == pytest.approx(exact.item(), rel=1e-6)


RANKS = pytest.mark.parametrize(
    ("preset", "world_size"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.long), ("fsdp", 2)]
)


def strict(text: str) -> Any:
    """JSON as RFC 8259 has it: NaN and Infinity are none of it."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def summary(folder: Path) -> dict[str, Any]:
    return dict(strict((folder / "summary.json").read_text(encoding="utf-8")))


def weights(folder: Path, which: str = "latest") -> dict[str, torch.Tensor]:
    return tensors(folder / "checkpoints", which=which)


def train(world_size: int, folder: Path, preset: str, *settings: str, stop_after: int | None = None) -> str:
    endings = set(run_ranks(world_size, train_and_tell, folder, preset, settings, stop_after))
    assert len(endings) == 1, "all ranks end alike"
    return str(endings.pop())


@RANKS
def test_three_bad_updates_end_the_run_with_the_weights_before(tmp_path: Path, preset: str, world_size: int) -> None:
    steady = ("schedule.name=constant", "schedule.warmup_epochs=0")
    assert train(world_size, tmp_path / "good", preset, *steady, "train.max_steps=4") == "finished"
    said = train(world_size, tmp_path / "run", preset, *steady, "data.positions='4,5,6'")
    assert said.startswith("1: Training has diverged: 3 updates in a row were not finite.\n  why: The loss")
    assert "The loss of the last one is nan. The weights are those from before these updates." in said
    done = summary(tmp_path / "run")
    assert done["outcome"] == "failed"
    assert "3 updates in a row were not finite" in done["why"]
    assert read_events(RunDir(tmp_path / "run"), "failed")
    assert not read_events(RunDir(tmp_path / "run"), "finished")
    good, bad = weights(tmp_path / "good"), weights(tmp_path / "run")
    assert all(torch.equal(good[name], bad[name]) for name in good), "those before the first bad update"


@pytest.mark.parametrize(("repeats", "step"), [(1, 5), (2, 9)])
def test_the_samples_of_a_bad_update_are_written_down(folder: Path, repeats: int, step: int) -> None:
    train(2, folder, "ddp", "data.positions='4'", f"augment.repeats={repeats}")
    (event,) = read_events(RunDir(folder), "nonfinite")
    assert event["samples"] == global_batch(range(SIZE), 0, step - 1, BATCH, repeats)
    assert event["samples"].count(global_batch(range(SIZE), 0, 4, BATCH)[0]) == repeats
    assert (event["step"], event["loss"], event["grad_norm"]) == (step, "nan", None)


@RANKS
def test_skip_goes_on_without_the_bad_updates(folder: Path, preset: str, world_size: int) -> None:
    bad = [3, 4, 5, 6, 9]
    settings = ("train.on_nonfinite=skip", f"data.positions='{','.join(map(str, bad))}'", "train.grad_clip_norm=5")
    assert train(world_size, folder, preset, *settings) == "finished"
    events = read_events(RunDir(folder), "nonfinite")
    assert [event["step"] for event in events] == [position + 1 for position in bad]
    assert all(event["grad_norm"] == "nan" for event in events)
    assert summary(folder)["val"]["acc1"] > 90
    assert summary(folder)["steps"] == PER_EPOCH


@pytest.mark.parametrize(("setting", "steps"), [("train.on_nonfinite=skip", 50), ("train.precision=fp16", 0)])
def test_neither_skip_nor_fp16_goes_on_for_ever(folder: Path, setting: str, steps: int) -> None:
    said = train(1, folder, "single", setting, "train.max_steps=70", "data.positions=all")
    assert said.startswith("1: Training has diverged: 50 updates in a row were not finite.")
    assert summary(folder)["steps"] == steps


@RANKS
def test_rollback_goes_back_to_a_checkpoint_and_on_with_later_data(folder: Path, preset: str, world_size: int) -> None:
    settings = ("train.on_nonfinite=rollback", "checkpoint.every_steps=3", "data.positions='4,5,6'")
    assert train(world_size, folder, preset, *settings) == "finished"
    run = RunDir(folder)
    (event,) = read_events(run, "rolled_back")
    assert (event["from_step"], event["step"], event["position"]) == (7, 6, 7)
    assert [event["step"] for event in read_events(run, "nonfinite")] == [5, 6, 7]
    assert summary(folder)["steps"] == PER_EPOCH
    assert [record["step"] for record in read_metrics(run, "train")] == list(range(1, PER_EPOCH + 1))


def test_a_run_resumed_among_bad_updates_is_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = ("data.positions='4,5,6'", "model.dropout=0.2")
    assert train(1, broken, "single", *settings, stop_after=6) == "preempted"
    assert train(1, broken, "single", *settings) == train(1, whole, "single", *settings)
    assert [event["step"] for event in read_events(RunDir(broken), "nonfinite")] == [5, 6, 7]
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(broken).items())


def test_what_is_not_a_number_is_never_the_best_and_never_written_as_json(folder: Path) -> None:
    bad = ("data.val=true", "data.positions='4'", "train.grad_clip_norm=1")
    assert train(1, folder, "single", "checkpoint.best=val/loss", *bad) == "finished"
    done = summary(folder)
    assert (done["best"], done["best_step"], done["val"]["loss"]) == ({"val/loss": None}, None, None)
    assert not (folder / "checkpoints/best").exists()
    assert done["test"]["loss"] > 0
    lines = [line for name in ("events", "metrics") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert any(strict(line).get("event") == "nonfinite" for line in lines)
    for state in folder.glob("checkpoints/*/state.json"):
        strict(state.read_text(encoding="utf-8"))


# fp16: an update is skipped whenever a gradient overflows, and the loss scale is halved


def test_schedule_and_step_stand_still_where_fp16_skips_and_the_data_go_on(tmp_path: Path) -> None:
    plain, skipping = tmp_path / "plain", tmp_path / "skipping"
    settings = ("train.precision=fp16", "train.max_steps=15")
    assert train(1, plain, "single", *settings) == "finished"
    assert train(1, skipping, "single", *settings, "data.positions='3,7'") == "finished"
    assert read_events(RunDir(skipping), "nonfinite") == []
    records = [read_metrics(RunDir(folder), "train") for folder in (plain, skipping)]
    rates = [[(record["step"], record["lr"]) for record in each] for each in records]
    assert rates[0] == rates[1]
    assert [step for step, _ in rates[0]] == list(range(1, 16))
    assert records[0][3]["loss"] != records[1][3]["loss"], "the skipped batch is not seen twice"
    assert summary(skipping)["skipped_steps"] == 2


@pytest.mark.parametrize("asks", [True, False])
def test_three_in_a_row_diverge_whenever_the_device_is_asked(
    asks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(update, "is_free_to_ask", lambda device: asks)
    told: list[dict[str, Any]] = []
    watch = NonFinite(parts_of(), lambda kind, **facts: told.append(facts), seed=0)

    def add(step: int, loss: float, norm: float, *, look: bool = False) -> None:
        bad = torch.tensor(float(norm == float("inf")))
        watch.add(step + 100, step, Update(torch.tensor(loss), Stepped(torch.tensor(norm), bad, None)))
        if look:
            watch.look()

    for step, norm in enumerate([float("inf")] * 2 + [1.0] + [float("inf")] * 2 + [1.0] * 94):
        add(step, 2.5, norm)
    assert [event["step"] for event in told] == ([0, 1, 3, 4] if asks else []), "99 updates wait to be asked about"
    add(99, 2.5, 1.0)
    assert [(event["step"], event["loss"], event["grad_norm"]) for event in told] == [
        (step, 2.5, "inf") for step in (0, 1, 3, 4)
    ]
    assert capsys.readouterr().out.count("not finite") == 4
    for step in (100, 101):
        add(step, float("nan"), float("inf"))
    with pytest.raises(DivergedError, match="last one is nan, the gradients' norm inf") as error:
        add(102, float("nan"), float("inf"), look=True)
    assert error.value.position == 202
