"""Threads that wait leave the cores to other programs, as long as these want them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.common.process import WAITING

PROJECT = Path(__file__).parents[2]
BEGIN = """
import threading, time
import torch
from trainkit.distributed import process_group
from trainkit.distributed.process_group import sharing_cores
process_group._LOOK_SECONDS = 0.02
torch.set_num_threads(2)
numbers = torch.zeros(1 << 18)

def looking():
    "CPU time, in milliseconds, of an addition by two threads and the pause after it."
    numbers.add_(1)
    began = time.process_time()
    for _ in range(20):
        numbers.add_(1)
        time.sleep(0.02)
    return (time.process_time() - began) / 20 * 1e3

def teams():
    return sum(thread.name == "team" for thread in threading.enumerate())

def wait_for(number):
    until = time.monotonic() + 30
    while teams() != number and time.monotonic() < until:
        time.sleep(0.02)
    return teams() == number
"""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it takes two cores"),
    pytest.mark.nightly,
]
NEEDED = len(os.sched_getaffinity(0)) - 1
"""Further teams of two that make more threads than CPUs."""


def told(code: str, **env: str) -> str:
    """What a process without OpenMP's variables prints."""
    own = {name: value for name, value in os.environ.items() if name not in (*WAITING, "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(
        command, cwd=PROJECT, env=own | env, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    return done.stdout


def test_in_a_crowd_they_sleep_at_once_and_only_as_long_as_it_is_there() -> None:
    code = f"""
process_group.CROWDED = 1e9
with sharing_cores():
    awake = looking()
    process_group.CROWDED = -1.0
    assert wait_for({NEEDED})
    asleep = looking()
    process_group.CROWDED = 1e9
    assert wait_for(0)
    again = looking()
print(awake, asleep, again)
"""
    awake, asleep, again = map(float, told(code).split())
    assert asleep < awake / 3
    assert asleep < again / 3


def test_their_teams_end_with_the_training() -> None:
    assert (
        told(f"""
process_group.CROWDED = -1.0
with sharing_cores():
    print(wait_for({NEEDED}))
print(wait_for(0), sum(thread.name == "cores" for thread in threading.enumerate()))
""")
        == "True\nTrue 0\n"
    )


@pytest.mark.parametrize("env", [{}, *({name: "7"} for name in WAITING)], ids=["one thread", *WAITING])
def test_the_users_word_counts_and_one_thread_waits_for_no_other(env: dict[str, str]) -> None:
    alone = "" if env else "torch.set_num_threads(1)\n"
    assert told(f"{alone}with sharing_cores(): print(threading.active_count())", **env) == "1\n"
