"""This process, its environment, and the one way to ask another program: bounded in time and in bytes.

A site's wrapper, a broken scheduler or a full disk makes any program silent, endless, or unreadable as UTF-8. What is
started here and asked nothing (ranks, a controller, a connection) is started elsewhere.
"""

import atexit
import fcntl
import gc
import math
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
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from trainkit.common import fileio, terminal
from trainkit.common.accelerators import MASKS
from trainkit.common.errors import SchedulerError

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
_PR_SET_CHILD_SUBREAPER = 36
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait; read when torch is loaded."""
_ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which a user says what glibc does with freed memory; read when a process starts."""
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""For ranks that train on the CPU. Otherwise glibc gives free memory at the end of its heap back to the kernel, and
takes it again as new pages: a thousand page faults an update of a small network, by chance of what lies at the end.
Setting one of the two lowers the other; 32 MiB is the most that glibc takes."""
_EXIT_CODE: list[int] = []
"""The exit code of a process that `leave` ends."""
# A job submitted inside a job (from salloc, from a notebook on a node) inherits its variables; its srun can then die,
# or be bound to the wrong CPUs, and its ranks would take themselves for those of the other job. What users set in
# SBATCH_* has become part of the plan, and as variables would outrank the flags in the script.
_LEAKS = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC|PMI|PMI2|PMIX|OMPI|TORCHELASTIC|SUBMITIT)_.*"
    r"|MPI_LOCAL.*|(GROUP_|ROLE_|LOCAL_|NODE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TRAINKIT_(RUN_DIR|ATTEMPT|SIMULATED_NODES|HEARTBEAT|SECRET|CLIENT|KEEPERS?)"
)
_KEPT = ("SLURM_CONF",)  # where the cluster is


# The environment


def is_set(*names: str, to: str = "") -> bool:
    """True if one of these variables is set, for a library or for this whole process; ``to``: to this value."""
    return any(value and to in ("", value) for value in map(os.environ.get, names))


def variable(name: str) -> str:
    """A variable of this process; empty if it is not set."""
    return os.environ.get(name, "")


def set_variables(variables: Mapping[str, str | None], *, unless_set: bool = False) -> None:
    """Set variables that libraries or the children of this process read; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        elif not (unless_set and is_set(name)):
            os.environ[name] = value


def replace_environment(env: Mapping[str, str]) -> None:
    """Make ``env`` the environment of this process, which has been forked to be another program."""
    os.environ.clear()
    os.environ.update(env)


def leaked(env: Mapping[str, str]) -> list[str]:
    """Names in ``env`` that describe a job or a rank, and must not reach a new one."""
    return sorted(set(filter(_LEAKS.fullmatch, env)).difference(_KEPT))


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without those."""
    found = dict(env)
    for name in leaked(env):
        del found[name]
    return found


def environment_alone() -> dict[str, str]:
    """This process's environment, for one that is no rank of its job and trains alone."""
    return scrubbed(os.environ) | {"PYTHONPATH": python_path(Path(__file__).parents[2], os.environ)}


def python_path(code: Path, env: Mapping[str, str]) -> str:
    """PYTHONPATH with the snapshot first."""
    given = env.get("PYTHONPATH", "")
    if given.partition(":")[0] == str(code):
        return given
    return f"{code}:{given}" if given else str(code)


def memory_variables(env: Mapping[str, str]) -> dict[str, str]:
    """`KEEP_FREED_MEMORY`, unless the user has set something in its place."""
    if any(map(env.get, _ALLOCATOR)):
        return {}
    return KEEP_FREED_MEMORY


def visible_cpus() -> int:
    """CPUs that this process may use: those in its mask, all of the machine's on macOS, which has no masks; or as many
    as a container's limit is worth."""
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    return min(cpus, cpu_limit())


@cache
def cpu_limit(root: Path = Path("/")) -> int:
    """CPUs whose time a container may take (docker's --cpus, Kubernetes' limits), at least 1; of these masks know
    nothing."""
    least = float(1 << 20)
    for folder, is_first in cgroups("cpu", root):
        with suppress(OSError, ValueError):  # no such group, or no limit: max
            if is_first:
                words = [fileio.read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
            else:
                words = fileio.read_text(folder / "cpu.max").split()
            quota, period = map(int, words)
            if quota > 0:
                least = min(least, quota / period)
    return math.ceil(least)


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """Folders of the groups that this process is in, from its own to the top: a container may not see its own path, but
    what is at the top. With each, whether it is of version 1."""
    with suppress(OSError):
        for line in fileio.read_text(root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            group = root / "sys/fs/cgroup" / (controller if controllers else "") / path.lstrip("/")
            for folder in (group, *group.parents):
                yield folder, bool(controllers)


@contextmanager
def share_of_cpus(index: int, count: int) -> Iterator[None]:
    """Have this thread, and what it starts, keep to every ``count``-th of its CPUs, where the system has masks; to all
    of them where they are too few."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[index::count] or cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def granted_cpus() -> int:
    """`visible_cpus`, or SLURM_CPUS_PER_TASK where that is less: a job may have four cores of a machine's 128."""
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if granted.isdigit() and int(granted):
        return min(visible_cpus(), int(granted))
    return visible_cpus()


def device_masks() -> dict[str, str]:
    """Variables of this process that leave it some of a node's accelerators."""
    return {name: os.environ[name] for name in MASKS if name in os.environ}


def state_home() -> Path:
    """The folder of this user's state, by ``XDG_STATE_HOME``, on whatever machine shares their home."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()


def node_disk() -> Path | None:
    """This node's own disk, if the job's environment names it."""
    found = os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR")
    if found and os.path.isdir(found):
        return Path(found)
    return None


def sleep_while_waiting() -> None:
    """Have OpenMP's threads sleep as soon as they wait, unless the user says otherwise; before torch is loaded."""
    if not is_set(*WAITING):
        set_variables({"GOMP_SPINCOUNT": "0"})


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
    _ask_kernel(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent (Linux) of what a child of this process leaves running when it ends."""
    _ask_kernel(_PR_SET_CHILD_SUBREAPER, 1)


def call_this_process(name: str) -> None:
    """Name this process for `top` and `ps` (Linux), in at most 15 characters: forks look alike otherwise."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _ask_kernel(option: int, value: int) -> None:
    import ctypes  # most commands do without

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def run_program(main: Callable[[Sequence[str], Mapping[str, str]], int]) -> NoReturn:
    """Run a ``python -m`` program: it gets its words and its environment, and its result is the exit code."""
    leave(main(sys.argv[1:], dict(os.environ)))


def leave(exit_code: int) -> NoReturn:
    """End this process by `SystemExit`, without taking apart what torch has made: half a second of a short command.

    Functions registered by ``atexit`` after this module was imported are called, and files are flushed.
    """
    _EXIT_CODE.append(exit_code)
    raise SystemExit(exit_code)


def leave_if_failing() -> None:
    """Have this process end as `leave` does with exit code 1 also when an error that nobody catches ends its program:
    the other ranks notice it by its end. That of a process that has loaded torch takes a second of a core."""
    before = sys.excepthook

    def tell(*error: Any) -> None:
        before(*error)
        _EXIT_CODE.append(1)

    sys.excepthook = tell


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
class ProgramOutput:
    """Output of a program. Bytes that are not UTF-8 are replaced."""

    program: str
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Its message of failure as one line; of a long one the end."""
        said = terminal.one_line(self.err.strip()[-_LONGEST:], _LONGEST)
        return said or f"{self.program} failed with exit code {self.code}"

    def shown(self) -> "ProgramOutput":
        """The same as lines that move no terminal. Raises NoAnswer if one of them is too long to be a fact."""
        out = terminal.lines(self.out)
        err = terminal.lines(self.err)
        longest = max(map(len, [*out.splitlines(), *err.splitlines()]), default=0)
        if longest > _LONGEST_LINE:
            words = f"gave an unreadable answer: one line has {terminal.size(longest)}"
            raise _no_answer(self.program, f"{self.program} {words}")
        return replace(self, out=out, err=err)

    def require(self) -> str:
        """Return its output. Raises NoAnswer if it has failed."""
        if self.code:
            raise _no_answer(self.program, self.words)
        return self.out


def ask(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, text: str = "",
    seconds: float | None = None,
) -> ProgramOutput:  # fmt: skip
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
    if seconds is None:
        seconds = PATIENCE_SECONDS
    program = command[0]
    until = time.monotonic() + seconds
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
    return ProgramOutput(program, process.returncode, *said)


def _scratch() -> IO[bytes]:
    """A file without a name, in memory where Python has such (conda's, built for old systems, has not): the disk may be
    full.

    A pipe would be open for as long as anything that the program has left running.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("scratch"), "w+b")
    return tempfile.TemporaryFile()


def _no_answer(program: str, words: str, kind: type[NoAnswer] = NoAnswer) -> NoAnswer:
    return kind(f"No answer from {program}.", why=f"{words}.", fix=f"Try `{program}` by hand, then repeat the command.")
