"""What peers say of themselves, as whoever reads it may rely on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainkit import terminal
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.errors import RefusedError, RunFailedError
from trainkit.models import build_model
from trainkit.swarm.agreement import facts_of, require_same, without_data
from trainkit.swarm.messages import Manifest, PeerProgress, RoundClock, no_data, progress_of

HONEST: dict[str, Any] = {
    "name": "ann@lab",
    "round": 3,
    "samples": 640,
    "samples_per_sec": 80.5,
    "loss": 1.25,
    "group": 4,
    "time": 1.7e9,
}


def test_an_honest_record_is_read_and_fields_of_later_versions_are_passed_over() -> None:
    assert progress_of({**HONEST, "mood": "good"}) == PeerProgress(**HONEST)


@pytest.mark.parametrize(
    "lie",
    [
        {"loss": float("inf")},
        {"loss": float("nan")},
        {"loss": 1e300},
        {"loss": "1.0"},
        {"samples_per_sec": 1e300},
        {"samples_per_sec": -1.0},
        {"samples": -1},
        {"samples": 1 << 60},
        {"samples": 1.5},
        {"samples": True},
        {"round": 1 << 80},
        {"group": 1 << 30},
        {"time": 1e300},
        {"client": "yes"},
        {"val_headline": 1e300},
        {"val_headline": "90"},
        {"val_loss": float("nan")},
        {"name": 5},
        {"name": b"ann"},
        {"name": ["ann"]},
    ],
)
def test_a_record_with_one_lie_in_it_is_none(lie: dict[str, Any]) -> None:
    assert progress_of({**HONEST, **lie}) is None


@pytest.mark.parametrize("value", [None, [], "text", 5, {}, {"name": "ann"}])
def test_what_is_no_record_is_none(value: object) -> None:
    assert progress_of(value) is None


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b]0;owned\x07eve", "eve"),
        ("\x1b[2Jeve\r\nmallory\tx", "eve mallory x"),
        ("gpj.\u202eexe", "gpj.\N{REPLACEMENT CHARACTER}exe"),
        ("\u2066a\u2069\u200b", "\N{REPLACEMENT CHARACTER}a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"),
        ("\x9b31mred", "red"),
        ("", "?"),
        ("\x1b[0m", "?"),
        ("z\u00fcrich \u6771\u4eac", "z\u00fcrich \u6771\u4eac"),
    ],
)
def test_a_name_is_one_line_that_a_terminal_may_show(name: str, shown: str) -> None:
    found = progress_of({**HONEST, "name": name})
    assert found is not None
    assert found.name == shown


def test_a_long_name_is_cut_and_one_without_end_is_none() -> None:
    found = progress_of({**HONEST, "name": "x" * 128})
    assert found is not None
    assert len(found.name) <= terminal.LONGEST_NAME + 3
    assert progress_of({**HONEST, "name": "x" * 129}) is None


# A peer that does not train builds the run's model without the run's data.

CONFIG = load("hivemind").config
MANIFEST = Manifest("id", "run", "", 1, "", num_classes=10, in_chans=1, image_size=8)


def facts_here(manifest: Manifest, theirs: dict[str, str], config: Config = CONFIG) -> dict[str, str]:
    """Of a machine without the data."""
    splits = no_data("digits", manifest)
    return without_data(facts_of(config, splits, build_model(config.model, splits.info, 0)), theirs, config)


@pytest.fixture(scope="module")
def theirs() -> dict[str, str]:
    """Of the creator, who has the digits."""
    splits = build_data(CONFIG.data)
    return facts_of(CONFIG, splits, build_model(CONFIG.model, splits.info, 0))


def test_its_model_is_the_runs(theirs: dict[str, str]) -> None:
    ours = facts_here(MANIFEST, theirs)
    require_same(theirs, ours)
    assert ours == theirs


@pytest.mark.parametrize("change", [{"num_classes": 9}, {"in_chans": 3}, {"image_size": 16}])
def test_a_manifest_that_says_otherwise_than_the_run_is_leads_to_another_model(
    change: dict[str, Any], theirs: dict[str, str]
) -> None:
    with pytest.raises(RefusedError, match="differs from the run in: model"):
        require_same(theirs, facts_here(replace(MANIFEST, **change), theirs))


def test_whatever_is_not_the_datas_must_still_be_alike(theirs: dict[str, str]) -> None:
    for key in theirs.keys() - {"data"}:
        told = {**theirs, key: "another"}
        with pytest.raises(RefusedError, match=f"differs from the run in: {key}"):
            require_same(told, facts_here(MANIFEST, told))


def test_code_of_a_data_set_need_not_be_there_but_a_models_must() -> None:
    def of(data: str, model: str) -> dict[str, str]:
        config = CONFIG.model_copy(
            update={
                "data": CONFIG.data.model_copy(update={"name": data}),
                "model": CONFIG.model.model_copy(update={"name": model}),
            }
        )
        return without_data({}, {"data": "x", "code of mine": "y", "seed": "0"}, config)

    assert of("mine:data", "fashion_cnn") == {"data": "x", "code of mine": "y"}
    assert of("mine:data", "mine:model") == {"data": "x"}
    assert of("digits", "mine:model") == {"data": "x"}


def test_nothing_of_it_can_be_trained_on() -> None:
    splits = no_data("digits", MANIFEST)
    assert [len(samples) for samples in (splits.train, splits.val, splits.test)] == [0, 0, 0]
    with pytest.raises(RunFailedError):
        splits.eval_transform(None)


CLOCK = RoundClock(seconds=10.0, first=100, count=3)  # rounds end at 1010, 1020 and 1030


@pytest.mark.parametrize(
    ("now", "index"), [(900.0, 0), (1000.0, 0), (1009.9, 0), (1010.0, 1), (1029.9, 2), (1030.0, 3), (9999.0, 3)]
)
def test_the_round_follows_from_the_time(now: float, index: int) -> None:
    assert CLOCK.index(now) == index


def test_the_run_ends_when_its_last_round_does() -> None:
    assert CLOCK.end == CLOCK.boundary(2) == 1030.0


@pytest.mark.parametrize("now", [1000.0, 1003.0, 1009.9])
def test_the_first_round_lasts_at_least_its_length(now: float) -> None:
    clock = RoundClock.starting(now, 10.0, 3)
    assert clock.index(now) == 0
    assert 10.0 <= clock.boundary(0) - now <= 20.0


def test_a_run_that_goes_on_starts_with_the_round_after_those_that_are_done() -> None:
    clock = RoundClock.starting(1003.0, 10.0, 5, done=2)
    assert clock.index(1003.0) <= 2
    assert clock.boundary(2) - 1003.0 >= 10.0


def test_the_clock_is_the_same_whenever_it_is_started_within_a_round() -> None:
    clocks = {RoundClock.starting(now, 10.0, 3) for now in (1000.0, 1003.0, 1009.9)}
    assert clocks == {RoundClock(10.0, first=101, count=3)}
    assert RoundClock.starting(1010.0, 10.0, 3) not in clocks


def test_a_peer_that_joins_later_is_in_the_same_round_as_the_creator() -> None:
    creator = RoundClock.starting(1003.0, 10.0, 3)
    joined = RoundClock(10.0, creator.first, 3)  # of what the creator has published
    assert [joined.index(now) for now in (1019.9, 1020.0, 1029.9, 1030.0, 1040.0)] == [0, 1, 1, 2, 3]
    assert (joined.boundary(0), joined.end) == (1020.0, 1040.0)


def test_the_schedule_spans_the_rounds() -> None:
    steps = [CLOCK.grid(now, epochs=20) for now in (900.0, 1000.0, 1015.0, 1030.0, 9999.0)]
    assert [step for step, _, _ in steps] == [0, 0, 10_000, 19_999, 19_999]
    assert {(per_epoch, total) for _, per_epoch, total in steps} == {(1000, 20_000)}
