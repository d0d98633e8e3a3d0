"""The process group: ranks join it with names, leave it together, and say so when they hang.

Nobody watches the ranks that srun has started, so a thread of each watches its own progress. All ranks of a hanging
run stop within one update, whichever of them is to blame. So each writes how far it is, and whether it waits for
others, into a small file beside its log; the first rank reads what all have written. The ranks of a run without a
scheduler do the same; their controller sees those that cannot, because they are stopped or gone.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import statistics
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from trainkit import fileio
from trainkit.distributed.device import backends, device_of_rank, intra_op_threads, make_current, require_exchanges
from trainkit.distributed.meeting import interfaces_set, meet
from trainkit.errors import RunFailedError, TrainkitError, error_from_json
from trainkit.process import is_set
from trainkit.ranks import NO_SECRET, RankEnv, Secret
from trainkit.ranks.signals import STARTING_SECONDS, hang
from trainkit.run.events import Attempt
from trainkit.run.folder import HANG

T = TypeVar("T")

# Names of a model's tensors are the longest of what ranks tell each other: 100 bytes each.
_LONGEST_JSON = 1 << 26


@dataclass(frozen=True)
class Distributed:
    """One rank among ``world_size``: its number, its device, and how to talk to the others."""

    env: RankEnv
    device: torch.device

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    @property
    def is_main(self) -> bool:
        return self.env.is_main

    def barrier(self) -> None:
        """Wait for every rank, over the CPU backend: a GPU's barrier would open a context on GPU 0 from every rank."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """True on every rank as soon as it is True on one."""
        if self.world_size == 1:
            return flag
        votes = torch.tensor([int(flag)])
        c10d.all_reduce(votes, op=c10d.ReduceOp.MAX)
        return bool(votes.item())

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum of ``tensor`` over the ranks, in place; the dtype is kept, so int64 counts stay exact."""
        if self.world_size > 1:
            c10d.all_reduce(tensor)
        return tensor

    def broadcast_json(self, value: T) -> T:
        """Rank 0's value on every rank: JSON's own types only, since nothing that came over a wire is unpickled."""
        if self.world_size == 1:
            return value
        return _from_json(self._broadcast(json.dumps(value if self.is_main else None).encode(), _LONGEST_JSON))  # type: ignore[no-any-return]

    def _broadcast(self, content: bytes, longest: int) -> bytes:
        """Rank 0's bytes on every rank."""
        size = torch.tensor([len(content)])
        c10d.broadcast(size, src=0)
        buffer = bytearray(content if self.is_main else _bounded(size, longest))
        if buffer:  # an empty one cannot be looked at as a tensor
            c10d.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=0)
        return bytes(buffer)

    def gather_json(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank: JSON's own types only."""
        if self.world_size == 1:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        c10d.all_gather(sizes, torch.tensor([content.numel()]))
        longest = max(_bounded(size, _LONGEST_JSON) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        c10d.all_gather(parts, torch.nn.functional.pad(content, (0, longest - content.numel())))
        return [_from_json(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def from_main(self, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, once, on every rank; if it raises an error for users there, it does on all."""
        content = self.together(lambda: make() if self.is_main else b"")
        return content if self.world_size == 1 else self._broadcast(content, sys.maxsize)

    def together(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on this rank; an error for users that it raises on any rank is raised on all."""
        try:
            made = make()
        except TrainkitError as error:
            self.raise_together(error)
            raise
        self.raise_together(None)
        return made

    def raise_together(self, error: TrainkitError | None) -> None:
        """Raise on every rank as soon as one has an error: that of the lowest rank.

        A rank that raised alone would leave the others waiting in their next collective.
        """
        if error is not None and self.world_size == 1:
            raise error
        if self.any(error is not None):
            for sent in self.gather_json(None if error is None else error.to_json()):
                if sent is not None:
                    raise error_from_json(sent)


def _from_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        why = f"{type(error).__name__}. Ranks of one run send nothing else."
        raise _stranger("What another rank has sent is not JSON.", why) from None


def _bounded(size: Tensor, longest: int) -> int:
    number = int(size.item())
    if not 0 <= number <= longest:
        raise _stranger(f"Another rank announces {number} bytes.", f"Ranks of one run send at most {longest}.")
    return number


def _stranger(what: str, why: str) -> RunFailedError:
    fix = "Start all ranks with the same version of trainkit, where no stranger can connect to them."
    return RunFailedError(what, why=why, fix=fix)


def is_sharded(value: Tensor) -> bool:
    """Whether each rank holds a part of it only: torch's DTensor, as FSDP makes them."""
    return hasattr(value, "_local_tensor")


def local_part(value: Tensor) -> Tensor:
    """What this rank holds of a tensor, where it lies; all of one that is not sharded.

    ``to_local`` would make a view through autograd, for each tensor of each update.
    """
    part: Tensor = getattr(value, "_local_tensor", value)
    return part


# Joining and leaving the group.


@contextmanager
def distributed(
    env: RankEnv,
    *,
    use_gpu: bool,
    secret: Secret = NO_SECRET,
    interface: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    collective_timeout: timedelta | None = None,
    met: tuple[str, Store] | None = None,
) -> Iterator[Distributed]:
    """Join the other ranks, and leave together with them.

    The GPU's own backend carries its tensors, and gloo those of the CPU. A single rank has a process group as well, so
    that nothing above has to distinguish.

    Args:
        use_gpu: train on the accelerator of this rank's ``local_rank`` among the visible ones, else on CPU.
        secret: what the ranks of this run know and nobody else.
        interface: the site's network interface for the ranks of several nodes; else that of the route to the head node.
        timeout: longest wait for the others at the start.
        collective_timeout: and in any collective; None: the same.
        met: where these ranks have met already, and a name that no other group has had there.

    Raises:
        RefusedError: this node has no such interface.
        RunFailedError: ranks are missing when the time is over; it names them and their hosts.
    """
    device = torch.device("cpu")
    if use_gpu:
        device = device_of_rank(env.local_rank)
        require_exchanges(device, env.world_size)
        make_current(device)
    if not is_set("OMP_NUM_THREADS"):
        torch.set_num_threads(intra_op_threads(env) if device.type == "cpu" else 1)
    # Kept here for as long as torch works with it: it holds no reference to the Python half of a store.
    name, place = met or ("", None)
    if env.world_size == 1:
        place = HashStore()  # alone: no port, so none in use
    elif place is None:
        place = meet(env, secret, timeout)
    carriers = backends(device)
    with interfaces_set(env, place, named=interface):
        c10d.init_process_group(
            carriers,
            store=PrefixStore(name, place) if name else place,
            rank=env.rank,
            world_size=env.world_size,
            timeout=collective_timeout or timeout,
            device_id=device if ":" in carriers else None,
        )
        try:
            dist = Distributed(env, device)
            yield dist
            # On a clean exit only: a rank that leaves early can abort the others while the interpreter shuts down;
            # after an exception the others may never arrive, and waiting would turn a crash into a hang.
            dist.barrier()
        finally:
            # A sharded model is full of cycles and holds the group; its threads would outlive it, ask for the
            # interpreter lock while the interpreter shuts down, and abort the process (1 of 14 two-rank FSDP runs over
            # gloo).
            gc.collect()
            c10d.destroy_process_group()


# Stopping together.

PAUSE_SECONDS = 0.25
"""Seconds between votes."""
MOST_APART = 16
"""Most polls from one vote to the next."""
FIRST = 64
"""Polls at the start that all vote, until it is known how fast polls are."""


class StopVote:
    """Agreement on stopping that costs no waiting: a poll starts a vote, and the next one reads it.

    A stop request is thus seen one poll later, by all ranks at the same poll; or a few, where polls come so fast that
    the ranks would do little else than vote. Every rank must poll equally often. The same message carries two more
    votes, on saving and on news, which are over once they have been read; how far each rank is with what it does behind
    training; and how many polls later the next vote is, by the clock of rank 0.
    """

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._running: tuple[c10d.Work, Tensor] | None = None
        self._agreed = False
        self._polls, self._next, self._apart = 0, 0, 1
        self._last, self._last_poll = time.monotonic(), 0  # the last vote, and the number of its poll
        self.save = False
        """Any rank wanted to save, by the vote that this poll has read, if it has."""
        self.news = False
        """The same: any rank has something to tell the others."""
        self.over = 0
        """How far the last rank is, as of the last vote."""

    def poll(self, requested: bool, *, save: bool = False, news: bool = False, over: int = 0) -> bool:
        """Cast this rank's votes; True once an earlier vote of any rank to stop was True."""
        if self._dist.world_size == 1:
            self.save, self.news, self.over = save, news, over
            return requested
        if self._running is None:
            self.save = self.news = False
        else:
            self.finish()
            self._next = self._polls + self._apart - 1
        if self._polls >= self._next:
            # Do not repeat a vote that was just counted: the ranks will save, or speak, now.
            asked = [int(requested), int(save and not self.save), int(news and not self.news), -over, self._pace()]
            votes = torch.tensor(asked)
            work = c10d.all_reduce(votes, op=c10d.ReduceOp.MAX, async_op=True)
            assert work is not None
            self._running = (work, votes)
        self._polls += 1
        return self._agreed

    def _pace(self) -> int:
        """After how many polls rank 0 would have the next vote."""
        now = time.monotonic()
        each = (now - self._last) / max(self._polls - self._last_poll, 1)
        self._last, self._last_poll = now, self._polls
        if not self._dist.is_main or self._polls < FIRST:
            return 1
        return max(1, min(MOST_APART, int(PAUSE_SECONDS / max(each, 1e-9))))

    def finish(self) -> None:
        """Wait for the vote under way, if any."""
        if self._running is not None:
            work, votes = self._running
            work.wait()
            self._running = None
            stop, save, news, behind, self._apart = votes.tolist()
            self._agreed, self.save, self.news, self.over = self._agreed or bool(stop), bool(save), bool(news), -behind


# Noticing a hang.

GATHER_SECONDS = 10.0
"""How long the ranks wait for one another to write down where they stand."""
FACTOR = 5
"""How many times as long as usual an update may take."""
_STEPS = 64
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_DATA = str(Path(__file__).parents[1] / "data") + os.sep
_SAVING = str(Path(__file__).parents[1] / "checkpoint" / "save.py")
LATE_SECONDS = 5.0
"""A thread that wakes up this much too late belongs to a process that was stopped, or starved."""


@dataclass(frozen=True)
class Stand:
    """Where a rank stands; the more beats the further it is."""

    beats: int
    waits: bool
    """It is inside a collective, or in a backward pass, which has them: for others, as far as can be seen."""
    where: str

    @classmethod
    def of(cls, beats: int, frame: FrameType | None) -> Stand:
        """Of the main thread's innermost frame."""
        inside = []
        while frame is not None and _is_library(frame.f_code.co_filename):
            inside.append(frame.f_code.co_filename)
            frame = frame.f_back
        waits = any(name.startswith((_TORCH + "distributed", _TORCH + "autograd", _OURS)) for name in inside)
        if frame is None:
            return cls(beats, waits, "")
        file, what = frame.f_code.co_filename, ""
        if file.startswith(_DATA):
            what = ", for its data loader"
        elif file == _SAVING:
            what = ", for its checkpoint to be written"
        return cls(beats, waits, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}{what}")


def _is_library(file: str) -> bool:
    """Code that waits for others in the name of whoever has called it: torch's, Python's own, and this package's."""
    own = file.startswith(_PYTHON) and "-packages" + os.sep not in file
    return own or file.startswith((_TORCH, _OURS, "<frozen "))


@contextmanager
def watchdog(
    attempt: Attempt, rank: int, hosts: Sequence[str], *, hang_seconds: float, beats_per_step: int
) -> Iterator[Callable[[], None]]:
    """Give what the main thread calls whenever it has made progress, while the body runs.

    If it is not called for `hang_seconds`, and for five times as long as an update usually takes, the process writes
    every thread's Python stack to stderr, records which ranks are behind, and ends with exit code 1.

    Args:
        attempt: ranks that do not share the folder of its logs know nothing of one another.
        hosts: by rank.
        beats_per_step: calls in an update.
    """
    pulse = Pulse(hang_seconds, beats_per_step)
    over, main = threading.Event(), threading.get_ident()

    def look() -> None:
        pause = min(1.0, hang_seconds / 10)
        armed, before = 0.0, time.monotonic()
        while not over.wait(pause):
            now = time.monotonic()
            pulse.excuse(now - before - pause)
            before = now
            if now - armed > 10 * pause:
                # For a main thread that holds Python's lock, so that this one cannot look: a timer in C. It cannot be
                # excused: so it has more patience, for jobs that SLURM suspends and lets go on.
                armed = now
                faulthandler.dump_traceback_later(2 * (pulse.patience() + GATHER_SECONDS), exit=True)
            if pulse.is_over():
                stand = Stand.of(pulse.beats, sys._current_frames().get(main))
                if _ends(attempt, rank, hosts, stand, pulse, over):
                    os._exit(1)

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    try:
        yield pulse.beat
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


class Pulse:
    """The progress of this rank."""

    def __init__(self, hang_seconds: float, beats_per_step: int) -> None:
        self._hang, self._per_step = hang_seconds, beats_per_step
        self._times: deque[float] = deque(maxlen=_STEPS * beats_per_step)
        self._last = time.monotonic()
        self.beats = 0

    def beat(self) -> None:
        self._last = time.monotonic()
        self._times.append(self._last)
        self.beats += 1

    def patience(self) -> float:
        """Seconds without a beat after which the rank hangs."""
        if self.beats < self._per_step:  # the first update may compile the model
            return max(self._hang, STARTING_SECONDS)
        starts = list(self._times)[:: self._per_step]
        steps = [after - before for before, after in pairwise(starts)]
        return max(self._hang, FACTOR * statistics.median(steps) if steps else 0.0)

    def excuse(self, seconds: float) -> None:
        """Not count what the process has not had: SLURM suspends jobs by SIGSTOP, and a machine may be overloaded."""
        if seconds > LATE_SECONDS:
            self._last += seconds

    def is_over(self) -> bool:
        return time.monotonic() - self._last > self.patience()


def _ends(attempt: Attempt, rank: int, hosts: Sequence[str], stand: Stand, pulse: Pulse, over: threading.Event) -> bool:
    """Say that this rank hangs, with the others; False if it goes on after all."""
    logs = attempt.logs
    words = f"Rank {rank} on {hosts[rank]} has made no progress for {pulse.patience():.0f} s"
    print(f"{words}. Its Python stacks:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    with suppress(OSError):  # a full disk must not keep it from ending
        HANG.send(logs, vars(stand), rank)
    deadline = time.monotonic() + GATHER_SECONDS
    expected = [other for other in range(len(hosts)) if (logs / f"rank-{other}.err").exists()]
    while time.monotonic() < deadline and not all(HANG.at(logs, other).exists() for other in expected):
        if over.wait(0.2) or pulse.beats != stand.beats:
            with suppress(OSError):
                HANG.at(logs, rank).unlink()
            return False
    stands = {}
    for other in expected:
        with suppress(ValueError, TypeError):
            stands[other] = Stand(**fileio.parse(HANG.read(logs, other)))
    if min(stands, default=rank) == rank:
        behind, words = verdict(stands, expected, hosts)
        with suppress(OSError):
            attempt.failed(hang(pulse.patience(), words), rank=behind, host="" if behind is None else hosts[behind])
    else:
        time.sleep(1)  # or the end of this one would end the first before it has written it down
    for worker in multiprocessing.active_children():  # of the data loader: their stacks too
        with suppress(OSError):
            os.kill(worker.pid or 0, signal.SIGUSR1)
    time.sleep(0.2)
    return True


def verdict(stands: dict[int, Stand], expected: Sequence[int], hosts: Sequence[str]) -> tuple[int | None, str]:
    """The first of the ranks that are behind, and words on all of them; None where none is behind another.

    Args:
        stands: of the ranks that have reported theirs.
        expected: ranks that should have.
        hosts: by rank.
    """
    stacks = "the stacks of all are in their .err"
    silent = [rank for rank in expected if rank not in stands]
    least = min((stand.beats for stand in stands.values()), default=0)
    last = [rank for rank, stand in stands.items() if stand.beats == least]
    behind = silent or [rank for rank in last if not stands[rank].waits] or last
    if not behind or (len(behind) == len(hosts) > 1):
        return None, f"; no rank is behind another; {stacks}"
    how = "says nothing: it is stopped, gone, or does not let its own watchdog run"
    if not silent:
        how = f"stands at {stands[behind[0]].where}"
    named = ", ".join(f"{rank} on {hosts[rank]}" for rank in behind[:8])
    return behind[0], f"; behind the others: rank {named}, which {how}; {stacks}"
