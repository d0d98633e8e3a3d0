"""Keeper of a rank: the process that a launcher starts as a rank, and that has the rank itself as a fork of its own.

The keeper has imported what the rank needs and waits without a device. When ranks fail of something that another start
may mend, all start again in place, in the same allocation, as the next attempt: each is a new fork of its keeper, so
that its imports are done, and the memory that they take is shared. Where that is not possible, or not worth it, the
keeper ends as its rank has ended, and the launcher goes on as it would without one. `keep` returns in the rank alone.
"""

import hashlib
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil

from trainkit.cluster.ranks import VARIABLE as SECRET
from trainkit.cluster.ranks import ForgedError, RankEnv, Secret
from trainkit.cluster.signals import SIGNALS, KeeperLink, StopFlag, ending_in_words, forget_heartbeat
from trainkit.common import fileio, terminal
from trainkit.common.process import adopt_orphans, call_this_process, end_with_parent, set_variables
from trainkit.diagnosis.rank_log import RankLog
from trainkit.recovery.channel import Channel
from trainkit.recovery.council import SAVE_SECONDS, Council
from trainkit.run.events import NUMBER, Attempt, job_of
from trainkit.run.history import history_of
from trainkit.run.run_lease import is_stopped

PLACE = "TRAINKIT_KEEPERS"
"""Variable with the address and port where the keepers of a run meet, ``HOST:PORT``; a launcher of ours sets it."""
CAN_FORK = sys.platform == "linux"
"""macOS ends forks of a process that has loaded its frameworks, as torch does."""
LEAST_MEMORY = 1 << 30
"""Bytes of free memory below which nothing is imported before a rank needs it."""
MEMORY = Path("/dev/shm")
"""Files in a node's memory."""
LEFT_SECONDS = 3600.0
"""After this what a run has left there is nobody's: it is used within minutes, unless all that keep it were killed."""
VERDICT_SECONDS = 30.0
"""Longest wait for the council once the rank has ended."""
LOOK_SECONDS = 0.2
"""Between two looks at the signals that have come."""
CONNECT_SECONDS = (0.5, 60.0)
"""Between the first two tries to reach the council, and at most: each pause is twice as long as the one before."""
LATE_SECONDS = 5.0
"""A keeper that has not looked for this long was stopped, or starved."""
NOTE_SECONDS = 2.0
"""Longest wait until a rank has taken note of the order to save and to end."""
EARLY_SECONDS = 3.0
"""Time to reach the council for a rank that has failed at once."""


def keep(env: Mapping[str, str], stop: StopFlag, preload: Callable[[], None]) -> Mapping[str, str]:
    """Keep this process's rank, where a launcher of ours has said where keepers meet. Returns in the rank alone.

    Args:
        env: this process's environment.
        stop: the flag of this process's handlers; the rank's own from now on.
        preload: imports what the rank needs; it leaves no thread behind and uses no device.

    Returns:
        The rank's environment, which is by then this process's.
    """
    attempt = Attempt.named_in(env)
    rank_env = RankEnv.from_mapping(env)
    if not (CAN_FORK and env.get(PLACE)) or attempt is None or rank_env.launcher in ("torchrun", "mpi"):
        return env
    keeper = Keeper(env, attempt, rank_env, stop)
    set_variables({PLACE: None})  # it is not for what the rank starts
    call_this_process("rank-keeper")
    if rank_env.local_rank == 0:
        keeper.tidy_memory()
    if rank_env.is_main:
        keeper.convene()
    adopt_orphans()
    if has_memory():
        with suppress(Exception):  # the rank meets the same error, and says so
            preload()
    keeper.run()
    return keeper.variables


class Keeper:
    """The keeper, until it has become a rank."""

    def __init__(self, variables: Mapping[str, str], attempt: Attempt, env: RankEnv, stop: StopFlag) -> None:
        self.variables = dict(variables)
        """Environment of the rank."""
        self._place = self.variables.pop(PLACE)
        self._attempt = attempt
        self._env = env
        self._secret = Secret.from_mapping(variables)
        self._stop = stop
        self._council = 0
        """Process of the council; 0 where it is another keeper's."""
        self._channel: Channel | None = None
        self._was_connected = False
        self._connect_at = 0.0
        self._pause = CONNECT_SECONDS[0]
        self._rank = 0
        """Process of the rank; 0 once it has ended: its id may be another process's then."""
        self._link = KeeperLink.make(_folder_in_memory(attempt.run.path, self._job_id()))
        self._keeps_memory = False
        self._phase: int | None = None
        self._phase_began = self._looked = time.monotonic()
        self._is_stuck = False
        self._told_at: float | None = None
        """When the rank was ordered to save and to end."""
        self._passed = 0
        """Signals that the rank has been told of."""

    def tidy_memory(self) -> None:
        """Remove what other jobs of the run have left in this node's memory, and other runs a while ago."""
        own = self._link.folder
        of_run = own.name.rpartition("-")[0]
        for folder in MEMORY.glob(f"trainkit-{os.geteuid()}-*"):
            with suppress(OSError):
                is_left = time.time() - folder.stat().st_mtime > LEFT_SECONDS
                is_earlier = folder.name.startswith(f"{of_run}-")
                if folder != own and (is_left or is_earlier) and fileio.is_own(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def convene(self) -> None:
        """Start the council, which ends with this process."""
        with _signals_blocked():
            self._council = fork()
        if self._council:
            return
        call_this_process("rank-council")
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    def _serve(self) -> None:
        port = int(self._place.rpartition(":")[2])
        address = "127.0.0.1" if self._env.on_one_machine else ""
        try:
            server = socket.create_server((address, port), backlog=4096)
        except OSError as error:
            terminal.warn(f"Ranks that fail are not started again in place: port {port}: {error.strerror}.")
            return
        Council(self._attempt, self._env.world_size, self._job_id(), self._secret).serve(server)

    def _job_id(self) -> str:
        return job_of(self.variables) or self.variables.get("SUBMITIT_LOCAL_JOB_ID", "")

    def run(self) -> None:
        """Keep the rank until it has ended for good, and end as it has. Returns in the rank alone."""
        while self._start():
            code = self._wait()
            if code != 0:  # one that ends well may leave something running on purpose
                self._end_orphans()
            start = None
            if code != 0 and not self._stop.requested:
                start = self._verdict(code)
            if start is None:
                self._end_as(code)
            self._prepare(start["start"], start["port"])

    def _start(self) -> bool:
        """Fork the rank. Returns False in the rank. No signal is lost meanwhile: those that wait arrive afterwards."""
        self._told_at = None
        self._is_stuck = False
        self.variables |= self._link.variable()
        set_variables(self._link.variable())
        with _signals_blocked():
            self._rank = fork()
            if self._rank == 0:
                call_this_process(f"rank-{self._env.rank}")
                if self._channel is not None:
                    self._channel.close()
                self._stop.requested = False
                self._stop.signals.clear()
        self._pass_on(is_told=False)
        return self._rank != 0

    def _prepare(self, number: int, port: int) -> None:
        """Make this process what the rank of the next attempt is a fork of: its environment, and its log."""
        before = self._attempt
        self._attempt = replace(before, number=number)
        self._secret = self._secret.derived(f"attempt/{number}")
        forget_heartbeat(self.variables)
        self._link.close()
        self._link = KeeperLink.make(self._link.folder)
        changed = {NUMBER: str(number), "MASTER_PORT": str(port), SECRET: self._secret.text}
        self.variables |= changed
        set_variables(changed)
        if self._env.local_rank == 0 and self._env.node_rank > 0:  # its folder may be this node's alone
            with suppress(FileExistsError):
                before.start_again(self._job_id(), node_rank=self._env.node_rank)
        fileio.make_folder(self._attempt.logs, before.run.path)
        for stream, ending in ((sys.stdout, ".out"), (sys.stderr, ".err")):
            stream.flush()
            with fileio.append(self._log(ending), before.run.path) as file:
                os.dup2(file.fileno(), stream.fileno())

    def _log(self, ending: str) -> Path:
        return self._attempt.logs / f"rank-{self._env.rank}{ending}"

    def _wait(self) -> int:
        """Wait for the end of the rank, and pass on what comes meanwhile. Returns its exit code."""
        until_end = _descriptor_of(self._rank)
        try:
            while True:
                self._hear(until_end)
                ended, status = os.waitpid(self._rank, os.WNOHANG)
                if ended:
                    self._rank = 0
                    return os.waitstatus_to_exitcode(status)
                self._connect()
                self._pass_on(is_told=self._env.is_signalled_itself)
                if self._told_at is not None:
                    self._end_if_late()
                self._look_at_pace()
        finally:
            for descriptor in until_end:
                os.close(descriptor)

    def _pass_on(self, *, is_told: bool) -> None:
        """Tell the rank of the signals that it has not been told of; ``is_told``: the launcher has done so itself."""
        if not self._rank:
            return
        for name in self._stop.signals[self._passed :]:
            if not is_told:
                with suppress(ProcessLookupError):
                    os.kill(self._rank, signal.Signals[name])
        self._passed = len(self._stop.signals)

    def _end_rank(self) -> None:
        """End the rank; one that has the state of the training saves it before."""
        if not self._rank:
            return
        if self._told_at is None and self._link.can_save and not is_stopped(self._rank):
            self._told_at = time.monotonic()
            self._link.order()
            self._tell({"saves": True})
            return
        with suppress(ProcessLookupError):
            os.kill(self._rank, signal.SIGKILL)

    def _end_if_late(self) -> None:
        """End a rank that has not done what it was ordered to."""
        assert self._told_at is not None
        waited = time.monotonic() - self._told_at
        if waited > (SAVE_SECONDS if self._link.saves else NOTE_SECONDS):
            self._end_rank()

    def _look_at_pace(self) -> None:
        """Tell the council when the rank has been in one computation for longer than its limit, and when it goes on."""
        now = time.monotonic()
        if now - self._looked > LATE_SECONDS:  # this process was stopped, and so may the rank have been
            self._phase_began += now - self._looked
        self._looked = now
        phase = self._link.phase
        if phase != self._phase:
            self._phase = phase
            self._phase_began = now
        is_stuck = phase is not None and now - self._phase_began > self._link.limit
        if is_stuck != self._is_stuck and self._tell({"stuck": is_stuck}):
            self._is_stuck = is_stuck

    def _end_orphans(self) -> None:
        """Kill what a rank has left behind, such as the data loaders of one that was killed."""
        for process in psutil.Process().children(recursive=True):
            if process.pid != self._council:
                with suppress(psutil.Error):
                    process.kill()
                    process.wait(1)

    def _end_as(self, code: int) -> NoReturn:
        """End as the rank has ended, so that the launcher sees what it would have seen without a keeper."""
        if self._council:
            os.kill(self._council, signal.SIGKILL)
        if not self._keeps_memory:
            shutil.rmtree(self._link.folder, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 128 - code)

    # The council

    def _connect(self) -> None:
        if self._channel is not None or time.monotonic() < self._connect_at:
            return
        host, _, port = self._place.rpartition(":")
        with suppress(OSError):
            channel = Channel.to(host, int(port), self._secret)
            channel.send({"join": self._env.rank, "host": socket.gethostname()})
            self._channel = channel
            self._was_connected = True
        self._connect_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, CONNECT_SECONDS[1])

    def _hear(self, others: list[int]) -> list[dict[str, Any]]:
        """Wait for a moment for the council, or for one of ``others``; the rank is ended where the council says so."""
        watched = list(others)
        if self._channel is not None:
            watched.append(self._channel.fileno())
        ready = select.select(watched, [], [], LOOK_SECONDS)[0]
        if self._channel is None or self._channel.fileno() not in ready:
            return []
        try:
            messages = self._channel.receive()
        except (OSError, ForgedError):
            self._channel.close()
            self._channel = None
            return []
        for message in messages:
            if message.get("end") == self._attempt.number:
                self._end_rank()
            elif message.get("hang") == self._attempt.number:
                self._link.hangs = True
        return messages

    def _tell(self, message: Mapping[str, Any]) -> bool:
        """Tell the council something of the rank. Returns False if it is gone."""
        if self._channel is None:
            return False
        try:
            self._channel.send({"attempt": self._attempt.number, "rank": self._env.rank, **message})
        except OSError:
            return False
        return True

    def _verdict(self, code: int) -> dict[str, Any] | None:
        """Tell the council how the rank has ended; what to start, or None to leave it to the launcher."""
        until = time.monotonic() + EARLY_SECONDS
        while not self._was_connected and time.monotonic() < until:
            self._connect()
            time.sleep(CONNECT_SECONDS[0] / 5)
        if self._channel is None:
            return None
        error = _error_of(self._attempt, self._env.rank, code)
        if not self._tell({"error": error, "host": socket.gethostname()}):
            return None
        until = time.monotonic() + VERDICT_SECONDS
        while self._channel is not None and time.monotonic() < until and not self._stop.requested:
            for message in self._hear([]):
                if "start" in message:
                    return message
                if "over" in message:
                    # On another node's behalf the launcher starts the ranks again: this one's memory is theirs.
                    self._keeps_memory = message.get("replaces") is True
                    return None
        return None


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Have requests to stop wait for the end of the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _folder_in_memory(run: Path, job_id: str) -> Path:
    """The folder of a job's ranks in this node's memory; that no one else writes there is looked at when it is used."""
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (str(run), job_id)]
    return MEMORY / "-".join(["trainkit", str(os.geteuid()), *digests])


def has_memory() -> bool:
    """True if there is room for imports that no rank needs yet."""
    return bool(psutil.virtual_memory().available > LEAST_MEMORY)


def fork() -> int:
    """Fork a process that ends with this one. Returns its id, and 0 in itself."""
    with warnings.catch_warnings():
        # Of the threads that numpy's library has, which it ends and starts again around a fork by itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        end_with_parent()
    return process


def _descriptor_of(process: int) -> list[int]:
    """Descriptor that can be read once a process has ended; none on systems that have no such."""
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def _error_of(attempt: Attempt, rank: int, code: int) -> str:
    """Why a rank has failed, as it has recorded it, or written to its log."""
    for failure in reversed(history_of(attempt.run).failures):
        if failure.attempt == attempt.number and failure.rank == rank:
            return failure.error
    if code < 0:
        return ending_in_words(code)
    return RankLog(attempt.logs / f"rank-{rank}.err").error or ending_in_words(code)
