"""Threads that wait leave the cores to others as long as others want them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.process import _WAITING

PROJECT = Path(__file__).parents[2]
BEGIN = """
import os, threading, time
import torch
from trainkit.distributed.process_group import sharing_cores, sleeping_teams
torch.set_num_threads(2)
numbers = torch.zeros(1 << 20)
def looking_on():
    "Milliseconds of CPU time of an addition by two threads and a pause."
    numbers.add_(1)
    began = time.process_time()
    for _ in range(20):
        numbers.add_(1)
        time.sleep(0.02)
    return (time.process_time() - began) / 20 * 1e3
def names():
    return {thread.name for thread in threading.enumerate()}
"""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux says how long a thread has waited"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it takes two cores"),
]


def run(code: str) -> str:
    """What a process without OpenMP's variables prints."""
    own = {name: value for name, value in os.environ.items() if name not in (*_WAITING, "OMP_NUM_THREADS")}
    return subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        cwd=PROJECT, env=own, stdout=subprocess.PIPE, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip


def test_with_more_threads_than_cpus_those_that_wait_sleep_at_once() -> None:
    told = run(
        "awake = looking_on()\n"
        "with sleeping_teams(): asleep = looking_on()\n"
        "print(awake, asleep, looking_on(), names())"
    ).split(maxsplit=3)
    awake, asleep, again = map(float, told[:3])
    assert asleep < awake / 3
    assert asleep < again / 3
    assert told[3].strip() == "{'MainThread'}"


def test_they_do_so_for_as_long_as_other_programs_want_the_cores() -> None:
    told = run(
        "import subprocess, sys\n"
        "def wait_for(there):\n"
        "    until = time.monotonic() + 50\n"
        "    while ('team' in names()) != there and time.monotonic() < until: sum(range(10000))\n"
        "    return 'team' in names()\n"
        "with sharing_cores():\n"
        "    before = 'cores' in names(), 'team' in names()\n"
        "    many = 4 * len(os.sched_getaffinity(0))\n"
        "    busy = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(many)]\n"
        "    try: crowded = wait_for(True)\n"
        "    finally:\n"
        "        for process in busy: process.kill(), process.wait()\n"
        "print(before, crowded, names())"
    )
    assert told == "(True, False) True {'MainThread'}\n"


def test_a_user_who_says_how_threads_wait_is_obeyed_and_so_is_one_thread() -> None:
    told = run(
        f"for name in {(*_WAITING, 'OTHER')!r}:\n"
        "    if name == 'OTHER': torch.set_num_threads(1)\n"
        "    os.environ[name] = '7'\n"
        "    with sharing_cores(): print(names())\n"
        "    del os.environ[name]\n"
        "with sleeping_teams(): print(names())"
    )
    assert told == "{'MainThread'}\n" * (len(_WAITING) + 2)
