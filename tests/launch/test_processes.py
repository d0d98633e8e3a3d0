from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.launch import supervisor as module
from trainkit.launch.supervisor import Death, Rank, RankGroup, caught_signals
from trainkit.run.lease import ProcessId

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def group(tmp_path: Path) -> Callable[..., RankGroup]:
    def make(*programs: str) -> RankGroup:
        return RankGroup(
            [
                Rank([sys.executable, "-c", program], os.environ, tmp_path / f"{rank}.out", tmp_path / f"{rank}.err")
                for rank, program in enumerate(programs)
            ]
        )

    return make


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if ProcessId.of(pid).started]


def test_ranks_that_succeed_end_with_zeros(group: Callable[..., RankGroup]) -> None:
    started = group("pass", "pass")
    assert started.wait() == [0, 0]
    assert started.deaths == []


def test_a_failing_rank_ends_the_others_within_seconds(group: Callable[..., RankGroup]) -> None:
    began = time.monotonic()
    started = group(SLEEP, "raise SystemExit(3)", STUBBORN)
    codes = started.wait()
    assert time.monotonic() - began < 15
    assert codes[1] == 3
    assert codes[2] == -signal.SIGKILL
    assert started.deaths == [Death(1, 3)]


def test_a_signal_before_python_is_ready_does_not_kill_a_rank(group: Callable[..., RankGroup]) -> None:
    started = group("import time; time.sleep(0.5)")
    started.signal(signal.SIGUSR2)
    started.signal(signal.SIGTERM)
    assert started.wait() == [0]


def test_signals_reach_the_ranks_and_not_their_children(group: Callable[..., RankGroup], tmp_path: Path) -> None:
    program = (
        "import signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        'signal.signal(signal.SIGUSR2, signal.SIG_DFL); print("up", flush=True); time.sleep(1.5)\'])\n'
        "got = []\n"
        "signal.signal(signal.SIGUSR2, lambda *_: got.append(1))\n"
        "raise SystemExit(child.wait() or len(got) - 1)\n"
    )
    started = group(program)
    until(lambda: "up" in (tmp_path / "0.out").read_text())
    started.signal(signal.SIGUSR2)
    assert started.wait() == [0]


def test_what_a_rank_leaves_behind_ends_with_it(group: Callable[..., RankGroup], tmp_path: Path) -> None:
    program = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid)"
    assert group(program).wait() == [0]
    left = int((tmp_path / "0.out").read_text())
    until(lambda: not alive([left]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
def test_ranks_do_not_outlive_whoever_started_them(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom trainkit.launch.supervisor import Rank, RankGroup\n"
        f"command = [sys.executable, '-c', {STUBBORN!r}]\n"
        "group = RankGroup([Rank(command, os.environ, Path('rank.out'), Path('rank.err'))])\n"
        "print(group._children[0].pid, flush=True)\ntime.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        rank = int(starter.stdout.readline())
        until(lambda: (tmp_path / "rank.out").read_text() != "")
        starter.kill()
    until(lambda: not alive([rank]))


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as child:
        process = ProcessId.of(child.pid)
        assert process.is_here()
        assert process.is_alive()
        stranger = replace(process, started="1")
        assert not stranger.is_alive()
        stranger.signal(signal.SIGKILL)
        assert child.poll() is None, "a process with a reused number must not be signalled"
        process.signal(signal.SIGKILL)
        child.wait()
        assert not process.is_alive()


def test_an_ended_process_that_nobody_has_waited_for_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = ProcessId.of(child.pid)
        child.kill()
        until(lambda: not process.is_alive())


def test_caught_signals_are_noted_and_then_as_before() -> None:
    noted: list[int] = []
    before = signal.getsignal(signal.SIGUSR2)
    with caught_signals((signal.SIGUSR2,), noted.append):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert noted == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_end_of_the_ranks_is_told_and_not_looked_for(
    group: Callable[..., RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 60.0)
    began = time.monotonic()
    assert group("pass", "import time; time.sleep(0.2)").wait() == [0, 0]
    assert time.monotonic() - began < 30


def test_a_rank_that_has_ended_before_a_signal_keeps_nobody_busy_while_the_others_run(
    group: Callable[..., RankGroup], tmp_path: Path
) -> None:
    started = group("print('up', flush=True)", "import time; time.sleep(1)")
    until(lambda: not alive([started.pid(0)]))
    started.signal(signal.SIGUSR2)  # which sees that it is gone
    ticks = []
    assert started.wait(lambda: ticks.append(1)) == [0, 0]
    assert len(ticks) < 30


def test_a_death_that_a_signal_has_come_across_is_one(group: Callable[..., RankGroup]) -> None:
    started = group("raise SystemExit(3)")
    until(lambda: not alive([started.pid(0)]))
    started.signal(signal.SIGUSR2)
    assert started.wait() == [3]
    assert started.deaths == [Death(0, 3)]
