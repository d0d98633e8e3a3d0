"""How a process of ours ends and waits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import wait_until
from trainkit.common import process
from trainkit.common.errors import SchedulerError
from trainkit.common.process import leaked, python_path, scrubbed

PROJECT = Path(__file__).resolve().parents[1]

BEGIN = """
import atexit, sys
from trainkit.common import process
from trainkit.common.process import leave

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


def test_a_rank_that_fails_takes_nothing_apart_either() -> None:
    code, out, err = ended("process.leave_if_failing()\nraise KeyError('bug')")
    assert (code, out) == (1, "registered\n")
    assert err.startswith("Traceback")
    assert err.endswith("KeyError: 'bug'\n")


def test_it_leaves_though_nobody_reads_its_output_any_more() -> None:
    command = [sys.executable, "-c", BEGIN + "print('x' * 99999); sys.stdout.close(); leave(0)"]
    assert subprocess.run(command, cwd=PROJECT, stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize("name", ["", *process.WAITING])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in process.WAITING:
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "7")
    process.sleep_while_waiting()
    assert os.environ.get("GOMP_SPINCOUNT") == {"": "0", "GOMP_SPINCOUNT": "7"}.get(name)


# Programs that misbehave, asked by `trainkit.common.process`.


def shell(script: str, seconds: float = 30.0, text: str = "") -> process.ProgramOutput:
    return process.ask(["bash", "-c", script], seconds=seconds, text=text)


def gone(file: Path) -> bool:
    """Whether the process whose number a program has written there is dead, or dies."""
    number, zombie = int(file.read_text()), psutil.STATUS_ZOMBIE
    return wait_until(lambda: not psutil.pid_exists(number) or psutil.Process(number).status() == zombie, 10)


def test_an_answer_is_a_code_and_two_texts_whose_odd_bytes_are_replaced() -> None:
    answer = shell(r"printf 'caf\xe9\n'; printf '\xff' >&2; exit 3")
    odd = "\N{REPLACEMENT CHARACTER}"
    assert (answer.code, answer.out, answer.err) == (3, f"caf{odd}\n", odd)


def test_what_is_said_of_a_failure_is_short_and_moves_no_terminal() -> None:
    assert shell(r"printf '\033[2Jno\033]0;title\007\n such\0job\n' >&2; exit 1").words == "no such job"
    answer = shell("yes warning | head -c 100000 >&2; echo refused >&2; exit 1")
    assert answer.words.endswith("warning refused")
    assert len(answer.words) <= 2000
    with pytest.raises(SchedulerError, match=r"\n  why: .*\n  fix: ") as caught:
        answer.require()
    assert (caught.value.exit_code, caught.value.why) == (4, f"{answer.words}.")
    with pytest.raises(process.NoAnswer, match="bash failed with exit code 3"):
        shell("exit 3").require()


def test_a_program_that_is_not_here_is_told_from_one_that_fails(tmp_path: Path) -> None:
    with pytest.raises(process.NoProgram, match="there is no no-such-program on this machine"):
        process.ask(["no-such-program"])
    with pytest.raises(process.NoProgram, match="there is no folder"):
        process.ask(["true"], cwd=tmp_path / "gone")
    (tmp_path / "text").write_text("")
    with pytest.raises(process.NoAnswer, match="cannot be started: Permission denied"):
        process.ask([str(tmp_path / "text")])
    with pytest.raises(process.NoAnswer, match="cannot be started: embedded null byte"):
        process.ask(["echo", "\0"])


@pytest.mark.parametrize("script", ["exec yes", "exec yes >&2", "exec tr '\\0' x < /dev/zero"])
def test_an_endless_answer_is_cut_off(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MOST", 2_000_000)
    began = time.monotonic()
    with pytest.raises(process.NoAnswer, match=r"gave no answer in its first 2\.0 MB"):
        shell(f"echo $$ > {tmp_path}/pid; {script}")
    assert time.monotonic() - began < 20
    assert gone(tmp_path / "pid")


def test_who_is_too_slow_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    deaf = f"trap '' TERM HUP INT; (echo $BASHPID > {tmp_path}/inner; while :; do sleep 1; done) & "
    with pytest.raises(process.NoAnswer, match=r"bash gave no answer within 0\.5 s"):
        shell(f"{deaf} echo $$ > {tmp_path}/outer; while :; do sleep 1; done", seconds=0.5)
    assert gone(tmp_path / "outer")
    assert gone(tmp_path / "inner")
    with pytest.raises(process.NoAnswer, match="within"):  # it hangs up, and stays
        shell(f"echo $$ > {tmp_path}/pid; exec sleep 60 >&- 2>&-", seconds=0.5)
    assert gone(tmp_path / "pid")


def test_what_an_ended_program_has_left_running_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    answer = shell(f"sleep 60 & echo $! > {tmp_path}/left; echo 4711")
    left = psutil.Process(int((tmp_path / "left").read_text()))
    try:
        assert (answer.code, answer.out) == (0, "4711\n")
        assert time.monotonic() - began < 20
        assert left.is_running()
    finally:
        left.kill()


def test_a_program_reads_what_it_is_given_or_not() -> None:
    text = "x" * 1_000_000
    assert shell("wc -c", text=text).out.strip() == "1000000"
    assert shell("cat", text=text).out == text
    assert shell("exec 0<&-; sleep 0.2; echo done", text=text).out == "done\n"
    assert shell("exec 2>&-; sleep 0.2; echo 4711").out == "4711\n"


def test_an_answer_needs_no_memfd_and_survives_stderr_being_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "echo a warning > /dev/stderr; echo refused >&2"
    assert shell(script).err == "a warning\nrefused\n"
    monkeypatch.delattr(os, "memfd_create", raising=False)  # conda's Python has none
    answer = shell(f"{script}; cat", text="4711")
    assert (answer.out, answer.err) == ("4711", "a warning\nrefused\n")


def test_ctrl_c_ends_the_program_too(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            shell(f"echo $$ > {tmp_path}/pid; exec sleep 60")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gone(tmp_path / "pid")


LEAKED = [
    "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME", "SRUN_CPUS_PER_TASK", "SBATCH_PARTITION",
    "SBATCH_ACCOUNT", "PMI_RANK", "PMIX_ID", "PMI2_X", "OMPI_COMM_WORLD_RANK", "RANK", "LOCAL_RANK", "GROUP_RANK",
    "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "SUBMITIT_EXECUTOR", "SUBMITIT_LOCAL_GLOBALID", "TRAINKIT_RUN_DIR", "TRAINKIT_ATTEMPT",
    "TRAINKIT_SIMULATED_NODES",
]  # fmt: skip
KEPT = [
    "HOME", "PATH", "SLURM_CONF", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRAINKIT_RUNS", "FRANK", "MY_RANK_X"
]  # fmt: skip


@pytest.mark.parametrize("name", [*LEAKED, *KEPT])
def test_what_describes_a_job_or_a_rank_does_not_reach_a_new_one(name: str) -> None:
    assert leaked({name: "1", "HOME": "/"}) == ([name] if name in LEAKED else [])
    assert scrubbed({name: "1"}) == ({} if name in LEAKED else {name: "1"})


def test_the_snapshot_goes_before_the_users_own_path() -> None:
    assert python_path(Path("/run/code"), {"PYTHONPATH": "/mine"}) == "/run/code:/mine"
    assert python_path(Path("/run/code"), {}) == "/run/code"


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/pod/box", {"cpu.max": "250000 100000"}),
        ("3:cpuset:/pod\n4:cpu,cpuacct:/pod/box", {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}),
    ],
    ids=["version 2", "version 1"],
)
def test_a_containers_limit_leaves_so_many_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, files: dict[str, str]
) -> None:
    """Masks do not know it: 16 loader processes and 64 threads would share two and a half cores."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    group = tmp_path / "sys/fs/cgroup" / ("cpu/pod" if "cpu," in line else "pod")
    (group / "box").mkdir(parents=True)
    for name, content in files.items():
        (group / name).write_text(content)
        (group / "box" / name).write_text("max 100000" if name == "cpu.max" else "-1")
    assert process.cpu_limit(tmp_path) == 3
    assert process.cpu_limit(tmp_path / "proc") > 10_000
    monkeypatch.setattr(process, "cpu_limit", lambda: 1)
    assert process.visible_cpus() == 1
