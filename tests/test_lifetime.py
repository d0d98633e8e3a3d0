"""How a process of ours begins and ends: what it registers, says and returns is kept, and nothing is taken apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
