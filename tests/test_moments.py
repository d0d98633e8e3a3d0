"""Moments as people write them, also where the clocks change."""

import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from trainkit.common.errors import UserError
from trainkit.common.moments import moment

BERLIN = ZoneInfo("Europe/Berlin")
MONDAY = datetime(2026, 11, 30, 10, 0, tzinfo=BERLIN)
SATURDAY = datetime(2026, 10, 24, 12, 0, tzinfo=BERLIN)
"""The day before the clocks go back."""


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Friday 9:00", "2026-12-04 09:00"),
        ("fri at 9:00", "2026-12-04 09:00"),
        ("monday 9:00", "2026-12-07 09:00"),
        ("Mon 10:30", "2026-11-30 10:30"),
        ("Friday", "2026-12-04 23:59"),
        ("tomorrow  18:00", "2026-12-01 18:00"),
        ("today 18:00", "2026-11-30 18:00"),
        ("18:00", "2026-11-30 18:00"),
        ("9:00", "2026-12-01 09:00"),
        ("2026-12-04", "2026-12-04 23:59"),
        ("2026-12-04 09:00", "2026-12-04 09:00"),
        ("2026-12-04T09:00+00:00", "2026-12-04 10:00"),
        ("90min", "2026-11-30 11:30"),
        ("in 36 hours", "2026-12-01 22:00"),
        ("2d", "2026-12-02 10:00"),
        ("1.5 weeks", "2026-12-10 22:00"),
    ],
)
def test_a_moment_is_the_next_of_its_name(text: str, meant: str) -> None:
    found = datetime.fromtimestamp(moment(text, MONDAY.timestamp()), BERLIN)
    assert f"{found:%Y-%m-%d %H:%M}" == meant


@pytest.mark.parametrize(("text", "hours"), [("Sunday 12:00", 25), ("1d", 24), ("24h", 24), ("2026-10-25 12:00", 25)])
def test_a_time_of_day_keeps_its_hour_when_the_clocks_change(text: str, hours: int) -> None:
    assert moment(text, SATURDAY.timestamp()) == SATURDAY.timestamp() + hours * 3600


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is not a time"),
        ("soon", "is not a time"),
        ("f 9:00", "is not a time"),
        ("25:00", "is not a time"),
        ("40", "is not a time"),
        ("2026-13-01", "is not a time"),
        ("-2d", "is not a time"),
        ("today 9:00", "has passed"),
        ("2020-01-01", "has passed"),
        ("0h", "has passed"),
    ],
)
def test_another_text_is_refused_with_examples(text: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        moment(text, MONDAY.timestamp())
    assert "'Friday 9:00'" in caught.value.fix
