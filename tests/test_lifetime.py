"""How a process of ours begins and ends: what it registers, says and returns is kept, and nothing is taken apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit import lifetime

PROJECT = Path(__file__).resolve().parents[1]

KEPT = """
import atexit, gc, sys
from trainkit import lifetime

class Loud:
    def __del__(self):
        print("taken apart")

before = gc.get_threshold()
lifetime.begin()
assert gc.get_threshold()[0] > 100 * before[0]
atexit.register(lambda: print("registered"))
ring = Loud()
ring.itself = ring
lifetime.settled()
assert gc.get_threshold() == before and gc.isenabled()
assert gc.get_freeze_count() > 0
gc.collect()
late = Loud()
"""


def ended(code: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", KEPT + code]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_it_ends_with_its_code_after_what_was_registered_and_takes_nothing_apart() -> None:
    assert ended("print('said'); lifetime.leave(3)") == (3, "said\nregistered\n", "")


def test_a_failing_one_ends_as_python_does_it_with_nothing_left_over() -> None:
    code, out, err = ended("raise KeyError('bug')")
    assert (code, out) == (1, "registered\ntaken apart\ntaken apart\n")
    assert err.endswith("KeyError: 'bug'\n")


def test_output_that_nobody_reads_any_more_does_not_hinder_the_end() -> None:
    command = [sys.executable, "-c", KEPT + "print('x' * 99999); sys.stdout.close(); lifetime.leave(0)"]
    assert subprocess.run(command, cwd=PROJECT, stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_where_nobody_has_begun_the_collector_is_left_as_it_is() -> None:
    """Tests, notebooks and programs of users build models by the same functions."""
    code = "import gc; from trainkit import lifetime; was = gc.get_threshold(); lifetime.settled()"
    check = "assert gc.get_threshold() == was; assert gc.get_freeze_count() == 0"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], cwd=PROJECT, check=True)


CIRCLES = """
import gc, weakref
from trainkit import lifetime

class Circle:
    def __init__(self):
        self.itself = self

def made():
    return weakref.ref(Circle())

"""


def holds(code: str) -> None:
    subprocess.run([sys.executable, "-c", CIRCLES + code], cwd=PROJECT, check=True)


def test_by_hand_garbage_is_collected_when_it_is_said_and_at_no_other_time() -> None:
    holds(
        "with lifetime.collecting_by_hand() as collect:\n"
        "    collect()\n"
        "    garbage = made()\n"
        "    many = [[] for _ in range(100_000)]\n"
        "    assert garbage() is not None\n"
        "    collect()\n"
        "    assert garbage() is None\n"
        "assert gc.isenabled()\n"
    )


def test_by_hand_what_was_there_at_the_first_time_is_not_looked_at_again_until_the_end() -> None:
    holds(
        "kept = [[] for _ in range(1000)]\n"
        "with lifetime.collecting_by_hand() as collect:\n"
        "    collect()\n"
        "    assert gc.get_freeze_count() > 1000\n"
        "assert gc.get_freeze_count() == 0\n"
    )


def test_what_was_frozen_before_stays_so() -> None:
    holds(
        "gc.freeze()\nwith lifetime.collecting_by_hand() as collect:\n    collect()\nassert gc.get_freeze_count() > 0\n"
    )


def test_a_collector_that_somebody_has_switched_off_stays_off() -> None:
    holds(
        "gc.disable()\n"
        "with lifetime.collecting_by_hand() as collect:\n"
        "    garbage = made()\n"
        "    collect()\n"
        "assert garbage() is not None and not gc.isenabled()\n"
    )


@pytest.mark.parametrize("name", ["", *lifetime._WAITING])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in lifetime._WAITING:
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "7")
    lifetime.sleep_while_waiting()
    assert os.environ.get("GOMP_SPINCOUNT") == {"": "0", "GOMP_SPINCOUNT": "7"}.get(name)
