from __future__ import annotations

import pickle

import pytest

from trainkit.errors import RefusedError, RunFailedError, SchedulerError, TrainkitError, UserError, did_you_mean


def test_an_error_is_three_lines_what_why_and_fix() -> None:
    assert str(UserError("No x.", why="It is gone.", fix="Make one.")) == "No x.\n  why: It is gone.\n  fix: Make one."


def test_what_is_not_known_is_no_line() -> None:
    assert str(UserError("No x.", fix="Make one.")) == "No x.\n  fix: Make one."


@pytest.mark.parametrize(
    ("kind", "code"), [(UserError, 2), (RefusedError, 3), (SchedulerError, 4), (RunFailedError, 1), (TrainkitError, 1)]
)
def test_every_kind_has_its_exit_code(kind: type[TrainkitError], code: int) -> None:
    assert kind("x").exit_code == code


@pytest.mark.parametrize("kind", [UserError, RefusedError, SchedulerError, RunFailedError])
def test_an_error_is_whole_when_it_comes_from_another_process(kind: type[TrainkitError]) -> None:
    there = pickle.loads(pickle.dumps(kind("what", why="why", fix="fix", key="optim.lr")))
    assert (type(there), there.what, there.why, there.fix, there.key) == (kind, "what", "why", "fix", "optim.lr")


def test_the_nearest_name_is_suggested() -> None:
    assert did_you_mean("optm", ["model", "optim"]) == "Did you mean 'optim'?"


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert did_you_mean("zzz", ["model", "optim"], otherwise="Look it up.") == "Look it up."
