"""The lease on a run folder: one process writes at a time.

``lease.json`` names the process that writes, and is renewed as long as it lives. The file is made anew, which succeeds
for one of several at once, and replaced by a rename; both are atomic on NFS too, where locks may not be. Ages are
differences of the file server's own time stamps, so the clocks of the machines do not matter. A holder on this machine
is dead when its process is gone; one elsewhere when it has not renewed for `EXPIRY_SECONDS`. A job that SLURM starts
again takes over from its own earlier attempt at once. A process that has lost the lease (stopped for a while, cut off,
thought dead) notices before its next write: `Lease.check`.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.common import fileio, terminal
from trainkit.common.errors import RunFailedError, UserError
from trainkit.run.folder import RunDir


@dataclass(frozen=True)
class ProcessId:
    """One process, on whatever machine, that cannot be mistaken for another one."""

    host: str
    pid: int
    started: str
    """When, as text that no other process of that number has."""
    space: str = ""
    """Scope of the number: a container, or a machine before and after a restart, may have the same host name."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a process that runs here now."""
        return cls(socket.gethostname(), pid, _start_time(pid) or "", _space())

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ProcessId | None:
        """Read what `fields` has put into a record; None if it is not there or was written by somebody else."""
        host = fields.get("host")
        pid = fields.get("pid")
        started = fields.get("process_started")
        space = fields.get("process_space", "")
        if isinstance(host, str) and isinstance(started, str) and isinstance(space, str) and type(pid) is int:
            return cls(host, pid, started, space)
        return None

    def fields(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "host": self.host, "pid": self.pid, "process_started": self.started, "process_space": self.space
        }  # fmt: skip

    @classmethod
    def seen_from_here(cls, word: str) -> ProcessId | None:
        """Find the process of a `word`; None if it is not seen here, as from a container or another machine."""
        number, _, started = word.partition(":")
        if not number.isdigit():
            return None
        seen = cls(socket.gethostname(), int(number), started, _space())
        return seen if seen.is_alive() else None

    def word(self) -> str:
        """The process for others on this machine, in one word."""
        return f"{self.pid}:{self.started}"

    def is_here(self) -> bool:
        """True if it counts among the processes that this one can see."""
        return self.host == socket.gethostname() and self.space in ("", _space())

    def is_alive(self) -> bool:
        """True if it runs still. Only meaningful where `is_here`."""
        return bool(self.started) and _start_time(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.is_here() and self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def is_stopped(pid: int) -> bool:
    """True if a process of this machine is held by SIGSTOP or a debugger."""
    return (_stat(pid) or [""])[0] in ("T", "t")


def _space() -> str:
    try:
        boot = fileio.read_text(Path("/proc/sys/kernel/random/boot_id"))[:8]
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """When a process started, as text that only it has; None if it does not run (a zombie does not)."""
    fields = _stat(pid)
    if fields is not None:
        return None if fields[0] in ("Z", "X") else fields[19]
    if not Path("/proc/self/stat").exists():  # a machine without /proc
        import psutil

        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                return str(process.create_time())
    return None


def _stat(pid: int) -> list[str] | None:
    try:
        stat = fileio.read_text(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # the name before it may hold anything


EXPIRY_SECONDS = 60.0
"""Time without renewal after which a holder on another machine is taken for dead."""
RENEW_SECONDS = 10.0
_MOMENT = 0.1


def written_into(run: RunDir) -> AbstractContextManager[None]:
    """Raises UserError where the system refuses what the block writes."""
    fix = "Free some space, or check the permissions."
    return fileio.disk_errors_as(f"Cannot write into {run.path}.", fix=fix)


@dataclass(frozen=True)
class Holder:
    """The process that writes a run, and for which job and attempt."""

    process: ProcessId
    job_id: str = ""
    """Job id of SLURM; empty where there is none."""
    attempt: int | None = None
    """None for a command that only prepares the run."""

    @classmethod
    def me(cls, *, job_id: str = "", attempt: int | None = None) -> Holder:
        """This process."""
        return cls(ProcessId.of(os.getpid()), job_id, attempt)

    def __str__(self) -> str:
        words = [f"process {self.process.pid} on {self.process.host}"]
        if self.job_id:
            words.insert(0, f"job {self.job_id}")
        if self.attempt is not None:
            words.append(f"attempt {self.attempt}")
        return ", ".join(words)

    def precedes(self, other: Holder) -> bool:
        """True if SLURM has started this one's job again as the other, whatever is left of it."""
        same_job = bool(self.job_id) and self.job_id == other.job_id
        return same_job and self.attempt is not None and other.attempt is not None and self.attempt < other.attempt


class StaleAttemptError(RunFailedError):
    """Another process writes the run by now: this one ends, and leaves the record to it."""


class Lease:
    """The right to write into a run folder, as long as `check` does not raise. Made by `lease_on`."""

    def __init__(self, run: RunDir, token: str) -> None:
        self._run = run
        self._token = token

    def check(self) -> None:
        """Raise StaleAttemptError unless this is still the writer. Reads a small file: call it before every write."""
        there = read_lease(self._run.lease)
        if there is None:
            time.sleep(_MOMENT)  # being replaced on a file system that is not quite atomic, or removed by hand
            there = read_lease(self._run.lease)
        if there is None or there.token != self._token:
            raise _stale(self._run, there.holder if there is not None else "somebody who removed its lease.json")

    def renew(self) -> None:
        """Show that this holder lives, unless the lease is another's by now."""
        if self.is_mine():
            os.utime(self._run.lease)

    def is_mine(self) -> bool:
        """True if the file names this holder now."""
        there = read_lease(self._run.lease)
        return there is not None and there.token == self._token


@contextmanager
def lease_on(
    run: RunDir,
    holder: Holder,
    *,
    is_dead: Callable[[Holder], bool] = lambda other: False,
    patience: float = EXPIRY_SECONDS + RENEW_SECONDS,
    in_turn: bool = False,
) -> Iterator[Lease]:
    """Hold the lease on ``run`` while the body runs, renewed by a thread.

    Args:
        is_dead: what else is known of a holder, from its scheduler.
        patience: how long to wait for a holder elsewhere that may be dead: its lease must expire first. One that is
            seen to renew is alive, and refuses at once.
        in_turn: it is waited for as well, for each holds the lease for a moment.

    Raises:
        UserError: somebody else writes, and lives; or the folder cannot be written.
    """
    with written_into(run):
        lease = _acquire(run, holder, is_dead, patience, in_turn)
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(RENEW_SECONDS):
            with suppress(OSError):  # a file server that does not answer now is asked again
                lease.renew()

    threading.Thread(target=renew, name="lease", daemon=True).start()
    try:
        yield lease
    finally:
        stop.set()
        with suppress(OSError):
            if lease.is_mine():
                run.lease.unlink(missing_ok=True)


def lease_of(run: RunDir, attempt: int) -> Lease | None:
    """The lease that the process which has started a script holds for it, on this machine; None if there is none."""
    there = read_lease(run.lease)
    if there is None or there.holder.attempt != attempt:
        return None
    process = there.holder.process
    if process.pid == os.getpid() or not process.is_here() or not process.is_alive():
        return None
    return Lease(run, there.token)


def is_written(run: RunDir) -> bool:
    """True if somebody holds the lease, or may: whoever wants to write finds out by `lease_on`."""
    there = read_lease(run.lease)
    if there is None:
        return False
    process = there.holder.process
    if process.is_here():
        return process.is_alive()
    return time.time() - there.renewed < EXPIRY_SECONDS


def _acquire(run: RunDir, holder: Holder, is_dead: Callable[[Holder], bool], patience: float, in_turn: bool) -> Lease:
    token = uuid.uuid4().hex
    deadline = time.monotonic() + patience
    first = None
    content = {"token": token, "job_id": holder.job_id, "attempt": holder.attempt, **holder.process.fields()}
    mine = run.path / f".lease-{token}"
    try:
        while True:
            fileio.write(mine, json.dumps(content), run.path)
            there = read_lease(run.lease)
            if there is None:
                with suppress(FileExistsError), fileio.create(run.lease, run.path) as out:
                    out.write(fileio.read_bytes(mine))
                    return Lease(run, token)
                continue
            first = first or there
            other = there.holder
            if holder.precedes(other):
                raise _stale(run, other)
            is_here = other.process.is_here()
            expired = mine.stat().st_mtime - there.renewed > EXPIRY_SECONDS
            is_over = other.precedes(holder) or (not other.process.is_alive() if is_here else expired)
            if is_over or is_dead(other):
                if _replace(mine, run, there.token):
                    return Lease(run, token)
                continue
            lives = is_here or there.renewed > first.renewed or there.token != first.token
            is_short = other.attempt is None and holder.attempt is not None  # the command that has started me
            if (lives and not (is_short or in_turn)) or time.monotonic() > deadline:
                raise UserError(
                    f"{run.name} is being written by {other}.",
                    why="Two writers of one run would overwrite each other's files.",
                    fix=f"Wait for it, or end it with `{terminal.command('cancel', run.path)}`.",
                )
            time.sleep(min(1.0, max(patience / 20, _MOMENT)))
    finally:
        mine.unlink(missing_ok=True)


def _stale(run: RunDir, who: object) -> StaleAttemptError:
    return StaleAttemptError(
        f"{run.name} has another writer now: {who}.",
        why="This process was believed dead; the other one repeats what was not saved.",
        fix=f"You need not do anything, unless both are yours: `{terminal.command('status', run.path)}`.",
    )


def _replace(mine: Path, run: RunDir, token: str) -> bool:
    """Put ``mine`` in the place of a dead holder's lease; False if somebody else does so."""
    right = run.path / f".lease-{token}.over"  # which only one can make: the right to replace that very lease
    try:
        fileio.create(right, run.path).close()
    except FileExistsError:
        with suppress(FileNotFoundError):  # left by one that died in the middle
            if mine.stat().st_mtime - right.stat().st_mtime > EXPIRY_SECONDS:
                right.unlink()
        time.sleep(_MOMENT)
        return False
    try:
        there = read_lease(run.lease)
        if there is None or there.token != token:
            return False
        os.replace(mine, run.lease)
        return True
    finally:
        right.unlink(missing_ok=True)


class _Content(NamedTuple):
    """A lease as it was read."""

    token: str
    holder: Holder
    renewed: float
    """Time stamp of the file server."""


def read_lease(file: Path) -> _Content | None:
    """Read the lease; None if there is none. One that cannot be read is nobody's, and expires like any other."""
    try:
        with fileio.open_regular(file) as content:  # opened, so that NFS asks its server anew
            renewed = os.fstat(content.fileno()).st_mtime
            fields = fileio.parse_object(content.read(10_000)) or {}
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno is not None:
            raise
        renewed, fields = file.stat().st_mtime, {}  # a FIFO in its place
    process = ProcessId.from_fields(fields) or ProcessId("an unknown machine", 0, "")
    attempt = fields.get("attempt")
    holder = Holder(process, str(fields.get("job_id") or ""), attempt if type(attempt) is int else None)
    return _Content(str(fields.get("token") or ""), holder, renewed)
