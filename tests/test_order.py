"""In which order the files of tests are started, see conftest.py."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LONGEST, WAITING, in_order

PROJECT = Path(__file__).parents[1]


def test_the_longest_start_first_and_those_that_wait_are_spread() -> None:
    computing, waiting = ["tests/a.py", "tests/b.py", LONGEST[1], LONGEST[0]], [WAITING[1], WAITING[0]]
    found = in_order([*computing, *computing, *waiting])
    assert found == [LONGEST[0], WAITING[0], LONGEST[1], WAITING[1], "tests/a.py", "tests/b.py"]


def test_what_is_listed_is_there() -> None:
    assert [name for name in (*LONGEST, *WAITING) if not (PROJECT / name).exists()] == []
