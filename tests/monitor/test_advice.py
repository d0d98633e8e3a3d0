from __future__ import annotations

import pytest

from trainkit.config.loading import load
from trainkit.monitor.advice import Place, advice

HERE = Place(world_size=2, workers=2, cpus=8)


def said_of(shares: dict[str, float]) -> str | None:
    return said(**shares)  # type: ignore[arg-type]


def said(
    *overrides: str, place: Place = HERE, preset: str = "ddp", total: float = 100.0, **shares: float
) -> str | None:
    """Of a run that spent so many percent on some things, and all else on the passes."""
    rest = (100.0 - sum(shares.values())) / 2
    percent = {"forward": rest, "backward": rest, **shares}
    seconds = {name: total * value / 100 for name, value in percent.items()}
    return advice({"start": 500.0, **seconds, "end": 500.0}, load(preset, overrides).config, place)


def test_waiting_for_data_wants_more_workers() -> None:
    assert said(data=62.0) == "62% data wait: data.workers=4"
    assert said(data=62.0, place=Place(world_size=1, workers=0, cpus=3)) == "62% data wait: data.workers=2"


def test_where_all_cpus_have_a_worker_it_wants_more_cpus() -> None:
    assert said(data=62.0, place=Place(world_size=1, workers=3, cpus=4)) == (
        "62% data wait: more CPUs for each rank, --cpus-per-task 8"
    )


def test_waiting_for_gradients_wants_less_to_send_or_to_send_it_more_rarely() -> None:
    assert (said(exposed=40.0) or "").endswith(": strategy.comm_hook=bf16")
    assert (said(exposed=40.0, preset="zero") or "").endswith(": strategy.comm_hook=bf16")
    again = said("strategy.comm_hook=bf16", "train.global_batch_size=64", exposed=40.0)
    assert (again or "").endswith(": train.global_batch_size=128")
    assert "train.global_batch_size" in (said(exposed=40.0, preset="fsdp") or ""), "it has no hooks"


def test_a_straggler_is_to_blame_for_waiting_and_no_setting() -> None:
    assert said(exposed=40.0, place=Place(world_size=2, workers=2, cpus=8, waits_for_one=True)) is None


def test_saving_and_validating_and_writing_too_often() -> None:
    assert said("checkpoint.every_epochs=1", checkpoint=12.0) == "12% saving: checkpoint.every_epochs=4"
    assert said("checkpoint.every_steps=10", checkpoint=12.0) == "12% saving: checkpoint.every_steps=40"
    assert said("train.eval_every_epochs=2", evaluation=35.0) == "35% validation: train.eval_every_epochs=8"
    assert (said("monitor.log_every=1", other=30.0) or "").endswith(": monitor.log_every=50")


def test_of_several_things_the_one_that_stands_out_most() -> None:
    assert (said(data=25.0, checkpoint=40.0) or "").startswith("40% saving")


@pytest.mark.parametrize(
    "shares",
    [
        {},
        {"data": 19.0},
        {"checkpoint": 9.0},
        {"evaluation": 29.0},
        {"exposed": 19.0},
        {"optimizer": 60.0},
        {"copy": 50.0},
    ],
)
def test_nothing_is_said_where_nothing_is_clear_or_no_setting_helps(shares: dict[str, float]) -> None:
    assert said_of(shares) is None


def test_nothing_is_said_of_a_short_run() -> None:
    assert said(data=62.0, total=29.0) is None
