"""What tests wait by."""

import time

import pytest

from tests import runs


def test_a_pause_of_the_machine_ends_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 400.0, 400.1))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    looks = iter((False, False, True))
    assert runs.wait_until(lambda: next(looks), 10.0)


def test_what_does_not_come_in_time_is_said() -> None:
    with pytest.raises(AssertionError, match=r"^not within 0\.1 s: the end of job 7$"):
        runs.wait_until(lambda: False, 0.1, lambda: "the end of job 7")
    with pytest.raises(AssertionError, match=r"^not within 0\.1 s$"):
        runs.wait_until(lambda: None, 0.1)
