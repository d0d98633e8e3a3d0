"""What peers say of themselves, as whoever reads it may rely on it."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit import terminal
from trainkit.swarm.messages import PeerProgress, progress_of

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
        {"val_acc1": 101.0},
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
