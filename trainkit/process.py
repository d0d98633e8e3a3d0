"""This process, its environment, and the one way to ask another program: bounded in time and in bytes.

A site's wrapper, a broken scheduler or a full disk makes any program silent, endless, or unreadable as UTF-8. What is
started here and asked nothing (ranks, a controller, a connection) is started elsewhere.
"""

import atexit
import fcntl
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NoReturn

from trainkit import terminal
from trainkit.accelerators import MASKS
from trainkit.errors import SchedulerError

PATIENCE_SECONDS = 30.0
"""For one answer, unless who asks says otherwise."""
MOST = 32_000_000
"""Bytes of one answer, on both streams together. 10,000 nodes or 100,000 jobs of a user take half of it."""
_LONGEST_LINE = 100_000
"""Characters: a partition of 10,000 nodes whose names have nothing in common."""
_LONGEST = 2000
"""Characters of what a program says of its failure: it is shown, and written down."""
_LOOK_SECONDS = 0.1
"""Between two looks at how much a program has said."""
_PR_SET_PDEATHSIG = 1
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait; read when torch is loaded."""
_CROWDED, _FEW_SPINS = 1.5, 5000
"""Load per core from which other programs want the cores: what a run itself has left of its last minute is below."""
_EXIT_CODE: list[int] = []
"""The exit code of a process that `leave` ends."""
# A job submitted inside a job (from salloc, from a notebook on a node) inherits its variables; its srun can then die,
# or be bound to the wrong CPUs, and its ranks would take themselves for those of the other job. What users set in
# SBATCH_* has become part of the plan, and as variables would outrank the flags in the script.
_LEAKS = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC|PMI|PMI2|PMIX|OMPI|TORCHELASTIC|SUBMITIT)_.*"
    r"|MPI_LOCAL.*|(GROUP_|ROLE_|LOCAL_|NODE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TRAINKIT_(RUN_DIR|ATTEMPT|SIMULATED_NODES|HEARTBEAT|SECRET|CLIENT)"
)
_KEPT = ("SLURM_CONF",)  # where the cluster is


# The environment


def is_set(*names: str, to: str = "") -> bool:
    """Whether one of these variables is set, for a library or for this whole process; ``to``: to this value."""
    return any(value and to in ("", value) for value in map(os.environ.get, names))


def set_variables(variables: Mapping[str, str | None], *, unless_set: bool = False) -> None:
    """Set variables that libraries or the children of this process read; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        elif not (unless_set and is_set(name)):
            os.environ[name] = value


def leaked(env: Mapping[str, str]) -> list[str]:
    """Names in ``env`` that describe a job or a rank, and must not reach a new one."""
    return sorted(name for name in env if _LEAKS.fullmatch(name) and name not in _KEPT)


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without those."""
    without = set(leaked(env))
    return {name: value for name, value in env.items() if name not in without}


def environment_alone() -> dict[str, str]:
    """This process's environment, for one that is no rank of its job and trains alone."""
    return scrubbed(os.environ) | {"PYTHONPATH": python_path(Path(__file__).parents[1], os.environ)}


def python_path(code: Path, env: Mapping[str, str]) -> str:
    """PYTHONPATH with the snapshot first."""
    return f"{code}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else str(code)


def visible_cpus() -> int:
    """CPUs in the mask of this process; all of the machine's on macOS, which has no masks."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def share_of_cpus(index: int, count: int) -> Iterator[None]:
    """Have this thread, and what it starts, keep to every ``count``-th of its CPUs, where the system has masks; to all
    of them where they are too few."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if own := cpus[index::count]:
        os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        if own:
            os.sched_setaffinity(0, cpus)


def granted_cpus() -> int:
    """`visible_cpus`, or SLURM_CPUS_PER_TASK where that is less: a job may have four cores of a machine's 128."""
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(visible_cpus(), int(granted) if granted.isdigit() else 0) or visible_cpus()


def device_masks() -> dict[str, str]:
    """Variables of this process that leave it some of a node's accelerators."""
    return {name: os.environ[name] for name in MASKS if name in os.environ}


def node_disk() -> Path | None:
    """This node's own disk, if the job's environment names it."""
    found = os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR")
    return Path(found) if found and Path(found).is_dir() else None


def sleep_while_waiting(spins: int = 0) -> None:
    """Have OpenMP's threads sleep when they wait, unless the user says otherwise. Call it before torch is loaded.

    Args:
        spins: how often a thread looks whether it may go on before it sleeps; libgomp's own number is 300,000, 10 ms.
    """
    if not is_set(*_WAITING):
        set_variables({"GOMP_SPINCOUNT": str(spins)})


def share_cores() -> None:
    """Where other programs want the cores, do not let threads hold them that only wait. Call it before torch is loaded.

    With four busy programs a core a small model trained at 58 images/s, and not at 3,109. On a free machine the short
    wait costs 4 to 7 %, because sleeping threads must be woken. Fewer threads would serve as well, but a sum's last
    bits depend on their number, and a run that was interrupted must end with those of one that was not.
    """
    if os.getloadavg()[0] > _CROWDED * (os.cpu_count() or 1):
        sleep_while_waiting(_FEW_SPINS)


# The life of this process


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import torch in this block: what it makes is no garbage, and looking through it is a sixth of a short command."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_with_parent() -> None:
    """Have the kernel kill this process (Linux) when the thread that started it ends, however it ends."""
    import ctypes  # most commands do without

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_program(main: Callable[[Sequence[str], Mapping[str, str]], int]) -> NoReturn:
    """Run a ``python -m`` program: it gets its words and its environment, and its result is the exit code."""
    leave(main(sys.argv[1:], dict(os.environ)))


def leave(exit_code: int) -> NoReturn:
    """End this process by `SystemExit`, without taking apart what torch has made: half a second of a short command.

    Functions registered by ``atexit`` after this module was imported are called, and files are flushed.
    """
    _EXIT_CODE.append(exit_code)
    raise SystemExit(exit_code)


@atexit.register
def _end() -> None:
    if not _EXIT_CODE:
        gc.unfreeze()  # a process that fails is taken apart, and libraries complain of what is left
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(_EXIT_CODE[-1])


# Other programs


class NoAnswer(SchedulerError):
    """A program has failed, or has not answered within its bounds."""

    @property
    def words(self) -> str:
        """Why, for a sentence of the caller's."""
        return self.why.removesuffix(".")


class NoProgram(NoAnswer):
    """There is no such program, or no such folder to start it in."""


@dataclass(frozen=True)
class Answer:
    """What a program has said. What is no UTF-8 is replaced."""

    program: str
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it says of its failure, as one line; of a long one the end."""
        said = terminal.one_line(self.err.strip()[-_LONGEST:], _LONGEST)
        return said or f"{self.program} failed with exit code {self.code}"

    def shown(self) -> "Answer":
        """The same as lines that move no terminal. Raises NoAnswer if one of them is too long to be a fact."""
        out, err = terminal.lines(self.out), terminal.lines(self.err)
        if (longest := max(map(len, [*out.splitlines(), *err.splitlines()]), default=0)) > _LONGEST_LINE:
            words = f"gave no answer that can be read: a line of it has {terminal.size(longest)}"
            raise _no_answer(self.program, f"{self.program} {words}")
        return replace(self, out=out, err=err)

    def require(self) -> str:
        """What it has printed. Raises NoAnswer if it has failed."""
        if self.code:
            raise _no_answer(self.program, self.words)
        return self.out


def ask(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, text: str = "",
    seconds: float | None = None,
) -> Answer:  # fmt: skip
    """Run a program to its end, which may be a failure.

    A program that goes beyond its bounds is killed with all that it has started. What an ended one has left running
    lives on, and is not waited for.

    Args:
        env: its environment; None: this process's own.
        text: what it reads from stdin.
        seconds: how long it may take; None: `PATIENCE_SECONDS`.

    Raises:
        NoProgram: it is not here.
        NoAnswer: it cannot be started, takes too long, or says too much.
    """
    seconds = PATIENCE_SECONDS if seconds is None else seconds
    program, until = command[0], time.monotonic() + seconds
    with _scratch() as given, _scratch() as out, _scratch() as err:
        given.write(text.encode())
        given.seek(0)
        for file in (out, err):  # a script's `> /dev/stderr` opens it anew: what follows must not be written over that
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        try:
            process = subprocess.Popen(
                command, env=env, cwd=cwd, stdin=given, stdout=out, stderr=err, start_new_session=True
            )
        except FileNotFoundError as error:
            missing = f"there is no {program} on this machine"
            words = missing if error.filename == program else f"there is no folder {terminal.one_line(error.filename)}"
            raise _no_answer(program, words, NoProgram) from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in a word
            raise _no_answer(program, f"{program} cannot be started: {getattr(error, 'strerror', error)}") from None
        try:
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_SECONDS)
                if sum(os.fstat(file.fileno()).st_size for file in (out, err)) > MOST:
                    raise _no_answer(program, f"{program} gave no answer in its first {terminal.size(MOST)}")
                if process.returncode is None and time.monotonic() > until:
                    raise _no_answer(program, f"{program} gave no answer within {seconds:g} s")
        finally:  # Ctrl-C, too: it does not reach another session
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a disk that hangs holds it, and must not hold the caller
                process.wait(1)
        said = [os.pread(file.fileno(), MOST, 0).decode(errors="replace") for file in (out, err)]
    return Answer(program, process.returncode, *said)


def _scratch() -> IO[bytes]:
    """A file without a name, in memory where Python has such (conda's, built for old systems, has not): the disk may be
    full.

    A pipe would be open for as long as anything that the program has left running.
    """
    return os.fdopen(os.memfd_create("scratch"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _no_answer(program: str, words: str, kind: type[NoAnswer] = NoAnswer) -> NoAnswer:
    return kind(f"No answer from {program}.", why=f"{words}.", fix=f"Try `{program}` by hand, then the same again.")
