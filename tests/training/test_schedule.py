from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.config.schema import OptimConfig, ScheduleConfig
from trainkit.errors import UserError
from trainkit.training.schedule import lr_at

TOTAL, PER_EPOCH = 100, 10


def lrs(*, lr: float = 1.0, total: int = TOTAL, **schedule: Any) -> list[float]:
    config = ScheduleConfig.model_validate(schedule)
    optim = OptimConfig(lr=lr)
    return [
        lr_at(step, optim=optim, schedule=config, steps_per_epoch=PER_EPOCH, total_steps=total) for step in range(total)
    ]


def test_onecycle_is_torchs_onecycle() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=TOTAL, pct_start=0.3, cycle_momentum=False
    )
    expected = []
    for _ in range(TOTAL):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        if len(expected) < TOTAL:
            theirs.step()
    assert lrs(name="onecycle", warmup_epochs=3) == pytest.approx(expected, rel=1e-6)


def test_step_is_torchs_step_after_its_warm_up() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    expected = []
    for _ in range(TOTAL // PER_EPOCH):
        expected += [theirs.get_last_lr()[0]] * PER_EPOCH
        optimizer.step()
        theirs.step()
    rates = lrs(name="step", warmup_epochs=1, step_epochs=3, gamma=0.5)
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:] == pytest.approx(expected[10:])


TENTHS = [0.1 * (step + 1) for step in range(10)]
COSINE: dict[str, Any] = {"name": "cosine", "warmup_epochs": 1, "final_lr_ratio": 0.1}
WSD: dict[str, Any] = {"name": "wsd", "warmup_epochs": 1, "decay_ratio": 0.4, "final_lr_ratio": 0.1}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (COSINE, {**dict(enumerate(TENTHS)), 10: 1.0, 55: 0.55}),
        ({"name": "constant", "warmup_epochs": 0.5}, {0: 0.2, **dict.fromkeys(range(5, 100), 1.0)}),
        # A quarter of the way down it is 1 - sqrt(1/4).
        (WSD, {**dict(enumerate(TENTHS)), **dict.fromkeys(range(10, 61), 1.0), 70: 0.1 + 0.9 * 0.5}),
        # A run shorter than its warm-up rises for half of it.
        ({"name": "cosine", "warmup_epochs": 5, "total": 6}, {0: 1 / 3, 1: 2 / 3, 2: 1.0, 3: 1.0}),
        ({"name": "wsd", "warmup_epochs": 5, "decay_ratio": 1.0, "total": 6}, {0: 1 / 3, 1: 2 / 3, 2: 1.0, 3: 1.0}),
        ({"name": "onecycle", "warmup_epochs": 0.2}, {0: 1 / 25, 1: 1.0}),
        ({"name": "onecycle", "warmup_epochs": 0.1}, {0: 1.0}),
        ({"name": "onecycle", "final_lr_ratio": 1e-9}, {99: 1 / 25 / 1e4}),  # its own end is not passed
    ],
)
def test_a_schedule_warms_up_stays_and_falls(schedule: Any, expected: dict[int, float]) -> None:
    rates = lrs(**schedule)
    assert {step: rates[step] for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_a_short_run_falls_from_where_its_warm_up_ends(name: str) -> None:
    rates = lrs(name=name, warmup_epochs=5, decay_ratio=1.0, total=6)
    assert rates[3] > rates[4] > rates[5]


@pytest.mark.parametrize(
    ("name", "last"), [("onecycle", 0.25), ("cosine", 0.25), ("constant", 1.0), ("step", None), ("wsd", None)]
)
def test_no_warm_up_is_possible_and_the_last_rate_is_the_floor(name: str, last: float | None) -> None:
    rates = lrs(name=name, warmup_epochs=0, final_lr_ratio=0.25)
    assert rates[0] == pytest.approx(1.0, rel=1e-2)
    assert last is None or rates[-1] == pytest.approx(last, rel=2e-3)
    assert name != "wsd" or 0.1 < lrs(**WSD)[-1] < 0.13


@pytest.mark.parametrize("name", ["onecycle", "cosine", "constant"])
def test_all_rates_are_in_proportion_to_the_peak(name: str) -> None:
    whole, half = (lrs(name=name, final_lr_ratio=0.25, lr=lr) for lr in (1.0, 0.5))
    assert half == pytest.approx([rate / 2 for rate in whole])


@pytest.mark.parametrize("warmup_epochs", [0, 0.05, 0.1, 0.3, 1, 50])
@pytest.mark.parametrize("name", ["onecycle", "cosine", "constant", "step", "wsd"])
def test_runs_of_few_updates_learn_whatever_their_warm_up(name: str, warmup_epochs: float) -> None:
    assert lrs(name=name, warmup_epochs=warmup_epochs, total=1) == [1.0]
    for total in range(2, 6):
        rates = lrs(name=name, warmup_epochs=warmup_epochs, total=total)
        assert all(0.0 < rate <= 1.0 for rate in rates)
        assert max(rates) >= 0.5


OWN = """
def falling(step, total_steps, lr):
    return lr * (1 - step / total_steps)

def asking(step, total_steps, lr, *, floor: float = 0.5, gamma, warmup_epochs, steps_per_epoch):
    return floor + gamma + warmup_epochs + steps_per_epoch

def wrong(step, total_steps, lr, *, gives):
    return {"text": "fast", "negative": -1.0, "nan": float("nan"), "none": None, "true": True}[gives]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of schedules of a user's own."""
    name = f"schedule_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_function_of_the_users_own_says_the_rate_of_each_update(own: str) -> None:
    assert lrs(name=f"{own}:falling", lr=0.5) == pytest.approx([0.5 * (1 - step / TOTAL) for step in range(TOTAL)])


def test_it_is_given_its_options_and_the_keys_that_it_asks_for(own: str) -> None:
    assert lrs(name=f"{own}:asking", gamma=0.25, warmup_epochs=2)[0] == 0.5 + 0.25 + 2 + PER_EPOCH
    assert lrs(name=f"{own}:asking", gamma=0.25, warmup_epochs=2, floor=1)[0] == 1 + 0.25 + 2 + PER_EPOCH


@pytest.mark.parametrize("gives", ["text", "negative", "nan", "none", "true"])
def test_what_is_no_rate_is_the_users_mistake(own: str, gives: str) -> None:
    with pytest.raises(UserError, match="for update 0 of 100") as refused:
        lrs(name=f"{own}:wrong", gives=gives)
    assert refused.value.key == "schedule.name"
