"""The one way to ask another program: bounded in time and in bytes, whatever that program is. And its environment.

A site's wrapper, a broken scheduler or a full disk makes any program silent, endless, or unreadable as UTF-8. What is
started here and asked nothing (ranks, a controller, a connection) is started elsewhere.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit import terminal
from trainkit.errors import SchedulerError

PATIENCE_SECONDS = 30.0
"""For one answer, unless who asks says otherwise."""
MOST = 32_000_000
"""Bytes of one answer, on both streams together. 10,000 nodes or 100,000 jobs of a user take half of it."""
_LONGEST_LINE = 100_000
"""Characters: a partition of 10,000 nodes whose names have nothing in common."""
_LONGEST = 2000
"""Characters of what a program says of its failure: it is shown, and written down."""
_AT_ONCE = 1 << 16
_LOOK_SECONDS = 0.1
"""So often a program is looked at that has ended while another process holds its pipes."""

# A job submitted inside a job (from salloc, from a notebook on a node) inherits its variables; its srun can then die,
# or be bound to the wrong CPUs, and its ranks would take themselves for those of the other job. What users set in
# SBATCH_* has become part of the plan, and as variables would outrank the flags in the script.
_LEAKS = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC|PMI|PMI2|PMIX|OMPI|TORCHELASTIC|SUBMITIT)_.*"
    r"|MPI_LOCAL.*|(GROUP_|ROLE_|LOCAL_|NODE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TRAINKIT_(RUN_DIR|ATTEMPT|SIMULATED_NODES|HEARTBEAT|SECRET|CLIENT)"
)
_KEPT = ("SLURM_CONF",)  # where the cluster is


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

    def shown(self) -> Answer:
        """The same as lines that move no terminal. Raises NoAnswer if one of them is too long to be a fact."""
        out, err = terminal.lines(self.out), terminal.lines(self.err)
        if (longest := max(map(len, [*out.splitlines(), *err.splitlines()]), default=0)) > _LONGEST_LINE:
            words = f"{self.program} gave no answer that can be read: a line of it has {terminal.size(longest)}"
            raise _no_answer(self.program, words)
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
    program, pipe = command[0], subprocess.PIPE
    seconds = PATIENCE_SECONDS if seconds is None else seconds
    try:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=pipe if text else subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        missing = f"there is no {program} on this machine"
        words = missing if error.filename == program else f"there is no folder {terminal.one_line(error.filename)}"
        raise _no_answer(program, words, NoProgram) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in a word
        raise _no_answer(program, f"{program} cannot be started: {getattr(error, 'strerror', error)}") from None
    try:
        out, err = _heard(process, program, text.encode(), seconds)
    finally:  # Ctrl-C, too: it does not reach another session
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        with suppress(subprocess.TimeoutExpired):  # a disk that hangs holds it, and must not hold the caller
            process.wait(1)
    return Answer(program, process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def _heard(process: subprocess.Popen[bytes], program: str, given: bytes, seconds: float) -> tuple[bytes, bytes]:
    """What the process prints on stdout and on stderr until it ends."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err, until = bytearray(), bytearray(), time.monotonic() + seconds
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ, out)
        ready.register(process.stderr, selectors.EVENT_READ, err)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            ready.register(process.stdin, selectors.EVENT_WRITE)
        while ready.get_map():
            has_ended = process.poll() is not None  # asked before the look: what it has said last is there by now
            if (left := until - time.monotonic()) <= 0:
                raise _no_answer(program, f"{program} gave no answer within {seconds:g} s")
            events = ready.select(0 if has_ended else min(left, _LOOK_SECONDS))
            if has_ended and not events:
                break
            for key, _ in events:
                if key.data is not None:
                    chunk = os.read(key.fd, _AT_ONCE)
                    key.data.extend(chunk)
                    if not chunk:
                        ready.unregister(key.fileobj)
                elif not (given := _rest(key.fd, given)) and process.stdin is not None:
                    ready.unregister(process.stdin)
                    process.stdin.close()
            if len(out) + len(err) > MOST:
                raise _no_answer(program, f"{program} gave no answer in its first {terminal.size(MOST)}")
    try:
        process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        raise _no_answer(program, f"{program} gave no answer within {seconds:g} s") from None
    return bytes(out), bytes(err)


def _rest(pipe: int, given: bytes) -> bytes:
    """What is still to be written; nothing, where nobody reads it."""
    try:
        return given[os.write(pipe, given) :]
    except BrokenPipeError:
        return b""


def _no_answer(program: str, words: str, kind: type[NoAnswer] = NoAnswer) -> NoAnswer:
    return kind(f"No answer from {program}.", why=f"{words}.", fix=f"Try `{program}` by hand, then the same again.")


def leaked(env: Mapping[str, str]) -> list[str]:
    """Names in ``env`` that describe a job or a rank, and must not reach a new one."""
    return sorted(name for name in env if _LEAKS.fullmatch(name) and name not in _KEPT)


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without those."""
    return {name: value for name, value in env.items() if name not in leaked({name: value})}


def python_path(code: Path, env: Mapping[str, str]) -> str:
    """PYTHONPATH with the snapshot first."""
    return f"{code}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else str(code)
