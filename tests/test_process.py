"""How a process of ours ends and waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit import process

PROJECT = Path(__file__).resolve().parents[1]

BEGIN = """
import atexit, sys
from trainkit.process import leave

class Loud:
    def __del__(self):
        print("taken apart")

atexit.register(lambda: print("registered"))
ring = Loud()
ring.itself = ring
"""


def ended(code: str) -> tuple[int, str, str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_it_leaves_with_its_code_and_takes_nothing_apart() -> None:
    assert ended("print('said'); leave(3)") == (3, "said\nregistered\n", "")


def test_a_failing_process_ends_as_python_ends_it() -> None:
    code, out, err = ended("raise KeyError('bug')")
    assert (code, out) == (1, "registered\ntaken apart\n")
    assert err.endswith("KeyError: 'bug'\n")


def test_it_leaves_though_nobody_reads_its_output_any_more() -> None:
    command = [sys.executable, "-c", BEGIN + "print('x' * 99999); sys.stdout.close(); leave(0)"]
    assert subprocess.run(command, cwd=PROJECT, stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_garbage_is_not_collected_while_a_library_is_imported_and_then_is() -> None:
    code = (
        "import gc; from trainkit.process import without_garbage_collection\n"
        "with without_garbage_collection():\n    assert not gc.isenabled()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 0"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


@pytest.mark.parametrize("name", ["", *process._WAITING])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in process._WAITING:
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "7")
    process.sleep_while_waiting()
    assert os.environ.get("GOMP_SPINCOUNT") == {"": "0", "GOMP_SPINCOUNT": "7"}.get(name)
