"""The process group: ranks join it with names, talk to each other, agree on stopping, and leave it together."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from trainkit.cluster.ranks import NO_SECRET, RankEnv, Secret
from trainkit.common.errors import RunFailedError, TrainkitError, error_from_json
from trainkit.common.process import WAITING, is_set, visible_cpus
from trainkit.distributed.device import backends, device_of_rank, intra_op_threads, make_current, require_exchanges
from trainkit.distributed.rendezvous import interfaces_set, meet

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

    def come_together(self, seconds: float) -> bool:
        """Wait for every rank, but no longer than that. Returns False if one has not come: the group is broken then."""
        if self.world_size == 1:
            return True
        work = c10d.all_reduce(torch.tensor([0]), async_op=True)
        assert work is not None
        try:
            return bool(work.wait(timedelta(seconds=seconds)))
        except RuntimeError:
            return False

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

    def broadcast_json(self, value: T, src: int = 0) -> T:
        """Return the value of rank ``src`` on every rank: JSON's own types only: nothing from a wire is unpickled."""
        if self.world_size == 1:
            return value
        content = json.dumps(value).encode() if self.rank == src else b""
        return _from_json(self._broadcast(content, _LONGEST_JSON, src))  # type: ignore[no-any-return]

    def _broadcast(self, content: bytes, longest: int, src: int = 0) -> bytes:
        """Bytes of rank ``src`` on every rank."""
        size = torch.tensor([len(content)])
        c10d.broadcast(size, src=src)
        buffer = bytearray(content or _bounded(size, longest))
        if buffer:  # an empty one cannot be looked at as a tensor
            c10d.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=src)
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
        """Return on every rank what rank 0 makes; an error for users that it raises there is raised on all."""
        content = self.together(lambda: make() if self.is_main else b"")
        if self.world_size == 1:
            return content
        return self._broadcast(content, sys.maxsize)

    def together(self, make: Callable[[], T]) -> T:
        """Return what ``make`` gives on this rank; an error for users that it raises on any rank is raised on all."""
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
    """Return whether each rank holds only a part of ``value``: torch's DTensor, as FSDP makes them."""
    return hasattr(value, "_local_tensor")


def local_part(value: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, where it lies; all of one that is not sharded.

    ``to_local`` would make a view through autograd, for each tensor of each update.
    """
    part: Tensor = getattr(value, "_local_tensor", value)
    return part


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
    store = PrefixStore(name, place) if name else place
    carriers = backends(device)
    own = device if ":" in carriers else None
    longest = collective_timeout or timeout
    shares = sharing_cores() if device.type == "cpu" else nullcontext()
    with interfaces_set(env, place, named=interface), shares:
        c10d.init_process_group(
            carriers, store=store, rank=env.rank, world_size=env.world_size, timeout=longest, device_id=own
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


CROWDED = 1.5
"""Load per core from which other programs want the cores: what a run itself has left of its last minute is below."""
_LOOK_SECONDS = 5.0
_PARALLEL = 1 << 17
"""Numbers that torch adds with all of its threads."""


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Have waiting threads give up their cores in this block, for as long as other programs want these.

    libgomp's threads look for 10 ms whether they may go on before they sleep, and for microseconds only where a process
    has more of them than it has CPUs. So further teams are begun, which sleep until the crowd has gone. Fewer threads
    would help as well, but a sum's last bits depend on their number, and a run that was interrupted must end with those
    of one that was not. Threads that always sleep at once make half as many images of a small model on a free machine.
    """
    if is_set(*WAITING) or torch.get_num_threads() == 1:
        yield
        return
    over = threading.Event()
    watch = threading.Thread(target=_watch_load, args=(over,), name="cores", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch_load(over: threading.Event) -> None:
    """Begin the further teams when it becomes crowded, and end them when the crowd has gone, or at the end."""
    free: threading.Event | None = None  # while there are further teams: what ends them
    while True:
        is_crowded = os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1)
        if is_crowded and free is None:
            free = threading.Event()
            _begin_teams(free)
        elif free is not None and not is_crowded:
            free.set()
            free = None
        if over.wait(_LOOK_SECONDS):
            break
    if free is not None:
        free.set()


def _begin_teams(free: threading.Event) -> None:
    """Begin so many teams that this process has more threads of libgomp's than CPUs."""

    def sleep() -> None:
        torch.zeros(_PARALLEL).add_(1)  # which begins this thread's team
        free.wait()

    size = torch.get_num_threads()
    for _ in range((visible_cpus() - size) // max(size - 1, 1) + 1):  # user code may have left it one thread
        threading.Thread(target=sleep, name="team", daemon=True).start()


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
        self._polls = 0
        self._next = 0
        self._apart = 1
        self._last = time.monotonic()  # the last vote
        self._last_poll = 0  # the number of its poll
        self.save = False
        """Any rank wanted to save, by the vote that this poll has read, if it has."""
        self.news = False
        """The same: any rank has something to tell the others."""
        self.over = 0
        """Progress of the last rank, as of the last vote."""

    def poll(self, requested: bool, *, save: bool = False, news: bool = False, over: int = 0) -> bool:
        """Cast this rank's votes; True once an earlier vote of any rank to stop was True."""
        if self._dist.world_size == 1:
            self.save = save
            self.news = news
            self.over = over
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
        self._last = now
        self._last_poll = self._polls
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
            self._agreed = self._agreed or bool(stop)
            self.save = bool(save)
            self.news = bool(news)
            self.over = -behind


class AllOrNone:
    """Agreement that all ranks have something, for which only those wait that have it.

    Every rank must ask equally often.
    """

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._running: tuple[c10d.Work, Tensor] | None = None
        self._had = False

    def have(self, has: bool) -> bool:
        """True if all ranks have it. Where only some had it the time before, `odd` tells which."""
        self._had = has
        if self._dist.world_size == 1:
            return has
        votes = torch.tensor([int(has), int(not has)])
        work = c10d.all_reduce(votes, op=c10d.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._running = (work, votes)
        if has:
            work.wait()
        return has and votes.tolist() == [1, 0]

    def odd(self) -> list[int]:
        """Ranks that had it where others had not, as of the last time; the same on all ranks."""
        if self._running is None:
            return []
        work, votes = self._running
        work.wait()
        self._running = None
        if votes.tolist() != [1, 1]:
            return []
        return [rank for rank, had in enumerate(self._dist.gather_json(self._had)) if had]
