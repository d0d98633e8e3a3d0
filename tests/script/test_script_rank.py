"""The end of a script as a rank: by itself, told to stop, killed, hanging, with what it has started."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.nvml import fake_nvml
from tests.runs import wait_until
from tests.script.conftest import TERM, USR2, Rank
from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import is_hang
from trainkit.common.jsonl import append_jsonl, read_jsonl
from trainkit.run.events import Attempt, read_events
from trainkit.run.history import history_of
from trainkit.script.idle import Idle

Make = Callable[..., Rank]
READY = "import os, signal, sys, time\nready = lambda: open(os.path.join(sys.argv[1], 'ready'), 'w').close()\n"


def saves(number: str, code: int = 0) -> str:
    """A script that ends with a code when it gets a signal."""
    return f"{READY}signal.signal(signal.{number}, lambda *_: sys.exit({code}))\nready()\ntime.sleep(60)"


IGNORES = f"{READY}ready()\ntime.sleep(60)"
ENDS = f"{READY}ready()\ntime.sleep(0.8)"
SHORT = ("launch.time=1", "launch.signal_seconds=1")
AGAIN = "launch.requeue=always"
RESTART = "launch.on_restart=--resume"
CASES = {
    # script, settings, what it is told, what comes of it
    "it saves": (saves("SIGUSR2"), (), (USR2,), "preempted"),
    "it saves when the machine wants it gone": (saves("SIGUSR2"), (), (TERM,), "preempted"),
    "it knows TERM alone": (saves("SIGTERM"), ("launch.stop_signal=TERM",), (USR2,), "preempted"),
    "it has a code for it": (saves("SIGUSR2", 85), ("launch.stop_exit_code=85",), (USR2,), "preempted"),
    "it is done": (saves("SIGUSR2"), ("launch.stop_exit_code=85",), (USR2,), "completed"),
    "it was still loading": (f"{READY}ready(); time.sleep(1)\n{saves('SIGUSR2')}", (), (USR2,), "preempted"),
    "it fails then": (saves("SIGUSR2", 1), (), (USR2,), 1),
    "it fails then, and may begin again": (saves("SIGUSR2", 1), (AGAIN,), (USR2,), "preempted"),
    "it ends by itself": (ENDS, (), (USR2,), "completed"),
    "it ignores it, and goes on at any price": (IGNORES, (*SHORT, AGAIN), (USR2,), "preempted"),
    "it ignores it, and has something to go on from": (IGNORES, (*SHORT, RESTART), (USR2,), "preempted"),
    "it ignores it until it is killed": (IGNORES, (), (USR2, TERM), 128 + TERM),
    "nobody tells it anything": ("pass", (), (), "completed"),
    "it fails": ("raise SystemExit(7)", (), (), 7),
    "it is killed": ("import os; os.kill(os.getpid(), 9)", (), (), 128 + 9),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_comes_of_a_script(case: str, rank: Make) -> None:
    body, settings, told, outcome = CASES[case]
    mine = rank(*settings, told=told)
    assert mine(body) == outcome
    life = history_of(mine.run)
    assert bool(life.handed_back) == (outcome == "preempted")
    recorded: dict[object, str] = {137: "killed by SIGKILL", 128 + TERM: "killed by SIGTERM", 7: "exit code 7"}
    expected = [recorded[outcome]] if outcome in recorded else []
    assert [failure.error[:17] for failure in life.failures] == expected
    assert life.is_script
    was_ended = [event.get("was_ended", False) for event in read_events(mine.run, "handed_back")]
    assert was_ended == [bool({AGAIN, RESTART}.intersection(settings))] * (outcome == "preempted")


def test_a_signal_goes_to_who_handles_it(rank: Make) -> None:
    """Not to a launcher that would die by it, but to what that has started."""
    worker = saves("SIGUSR2").replace("\n", "; ").replace("lambda *_: sys.exit(0)", "lambda *_: os._exit(0)")
    body = f"import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-S', '-c', {worker!r}, sys.argv[1]]))"
    assert rank(told=(USR2,))(body) == "preempted"


def test_who_handles_a_request_to_stop_is_told_once(rank: Make) -> None:
    """It may have queued its job again, which SLURM then ends by a SIGTERM."""
    told = "lambda *_: open(sys.argv[1] + '/told', 'a').write('x')"
    mine = rank(told=(USR2, TERM))
    mine(f"{READY}signal.signal(signal.SIGUSR2, {told})\nready()\nend = time.time() + 1.5\n"
         "while time.time() < end: time.sleep(0.1)")  # fmt: skip
    assert (mine.run.path / "told").read_text() == "x"


def test_what_a_hanging_script_has_started_ends_with_it(rank: Make, tmp_path: Path) -> None:
    body = "import os, sys, time, subprocess\n"
    body += "child = subprocess.Popen(['sleep', '60'])\nopen(sys.argv[1] + '/child', 'w').write(str(child.pid))\n"
    mine = rank("launch.hang_seconds=1")
    assert mine(f"{body}time.sleep(60)") == 128 + signal.SIGKILL
    pid = (mine.run.path / "child").read_text()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(), 5)
    assert read_events(mine.run, "failed")[0]["error"] == "no progress for 1 s (launch.hang_seconds)"


LIVELY = {
    "works": "while time.time() < end: pass",
    "records": "while time.time() < end: open(sys.argv[1] + '/metrics.jsonl', 'a').write('{}\\n'); time.sleep(0.2)",
}


@pytest.mark.parametrize("sign", LIVELY)
def test_who_works_or_records_does_not_hang(sign: str, rank: Make) -> None:
    body = f"import os, sys, time\nend = time.time() + 2\n{LIVELY[sign]}"
    assert rank("launch.hang_seconds=1")(body) == "completed"


BUSY: dict[str, tuple[list[int], bool]] = {
    # percent of each GPU, none: there is no driver, below 0: it does not tell. Is the second of two ranks alive?
    "its own GPU works": ([0, 1], True),
    "only the other rank's GPU works": ([99, 0], False),
    "one of the GPUs of a launcher works": ([0, 0, 5, 0], True),
    "all GPUs rest": ([0, 0], False),
    "its GPU does not tell": ([0, -1], False),
    "no driver": ([], False),
}


@dataclass
class Clock:
    """The clock of a watch, which the test turns."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def looks(self, idle: Idle, seconds: int) -> list[str]:
        """Let a watch look every ten seconds; return what it says each time."""
        said = []
        for _ in range(seconds // 10):
            self.now += 10
            said.append(idle.look())
        return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    turned = Clock()
    monkeypatch.setattr("trainkit.script.idle.time", turned)
    return turned


@pytest.mark.parametrize("case", BUSY)
def test_whose_gpu_works_does_not_hang(case: str, rank: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, lives = BUSY[case]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus=len(busy), driver=bool(busy), busy=busy))
    place = replace(RankEnv.single(), rank=1, world_size=2, local_rank=1, local_world_size=2)
    with subprocess.Popen(["sleep", "60"]) as child:
        idle = Idle(60, Attempt.begin(rank().run), place, child.pid, only_with_records=False)
        said = clock.looks(idle, 100)
        child.kill()
    assert is_hang(said[-1]) != lives


def test_by_default_only_a_script_that_writes_records_may_hang(rank: Make, clock: Clock) -> None:
    mine = rank()
    attempt = Attempt.begin(mine.run)
    by_default = Idle.of(mine.config.launch, attempt, RankEnv.single(), os.getpid())
    assert by_default is not None
    assert by_default._only_with_records
    with subprocess.Popen(["sleep", "60"]) as child:
        idle = Idle(60, attempt, RankEnv.single(), child.pid, only_with_records=True)
        assert set(clock.looks(idle, 200)) == {""}
        append_jsonl(mine.run.metrics, {"step": 1})
        said = clock.looks(idle, 80)
        child.kill()
    assert said[:6] == [""] * 6
    assert is_hang(said[-1])


def test_words_for_a_restart_come_from_the_second_attempt_on(rank: Make) -> None:
    """And once what they name is there."""
    tell = f"{READY}open(sys.argv[1] + '/argv', 'a').write(' '.join(sys.argv[2:]) + '.')"
    mine = rank('launch.on_restart=--resume "{run}/last.pt"')
    assert [mine(tell), mine(tell)] == ["completed", "completed"]
    (mine.run.path / "last.pt").touch()
    assert mine(tell) == "completed"
    assert (mine.run.path / "argv").read_text() == f"..--resume {mine.run.path}/last.pt."


def test_the_hardware_is_sampled_while_a_script_runs(rank: Make) -> None:
    mine = rank("monitor.hardware_every_seconds=0.2")
    mine(f"{ENDS}; open(sys.argv[1] + '/told', 'w').write(os.environ['TRAINKIT_SAMPLED'])")
    (file,) = mine.run.path.glob("system-*.jsonl")
    assert len(list(read_jsonl(file))) > 2
    assert (mine.run.path / "told").read_text() == "1"  # or `trainkit.rank` in it would sample once more
