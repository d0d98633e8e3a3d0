"""The process group: joined with names, left together."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from trainkit.distributed.cores import sharing_cores
from trainkit.distributed.device import intra_op_threads
from trainkit.distributed.interfaces import interfaces_set
from trainkit.distributed.meeting import meet
from trainkit.errors import RunFailedError, TrainkitError, error_from_json
from trainkit.ranks.env import RankEnv, device_index
from trainkit.ranks.secret import NO_SECRET, Secret

T = TypeVar("T")

# Names of a model's tensors are the longest of what ranks tell each other: 100 bytes each.
_LONGEST_JSON = 1 << 26


@dataclass(frozen=True)
class Distributed:
    """One rank among ``world_size``: who it is, its device, and how to talk to the others."""

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
        return self.env.rank == 0

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            # A reduction over the CPU backend: NCCL's barrier would open a context on GPU 0 from every rank.
            c10d.all_reduce(torch.zeros(1))

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
        content = _to_bytes(value if self.is_main else None)
        size = torch.tensor([content.numel()])
        c10d.broadcast(size, src=0)
        if not self.is_main:
            content = torch.empty(_bounded(size), dtype=torch.uint8)
        c10d.broadcast(content, src=0)
        return _from_bytes(content)  # type: ignore[no-any-return]

    def gather_json(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank: JSON's own types only."""
        if self.world_size == 1:
            return [value]
        content = _to_bytes(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        c10d.all_gather(sizes, torch.tensor([content.numel()]))
        longest = max(_bounded(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: content.numel()] = content
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        c10d.all_gather(parts, padded)
        return [_from_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def from_main(self, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, once, on every rank; if it raises an error for users there, it does on all."""
        content = self.together(lambda: make() if self.is_main else b"")
        if self.world_size == 1:
            return content
        size = torch.tensor([len(content)])
        c10d.broadcast(size, src=0)
        # An empty buffer cannot be looked at as a tensor.
        tensor = torch.frombuffer(bytearray(content or bytes(int(size.item()) or 1)), dtype=torch.uint8)
        c10d.broadcast(tensor, src=0)
        return tensor.numpy().tobytes()[: int(size.item())]

    def together(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on this rank; an error for users that it raises on any rank is raised on all."""
        made: list[T] = []
        failed: TrainkitError | None = None
        try:
            made.append(make())
        except TrainkitError as error:
            failed = error
        self.raise_together(failed)
        return made[0]

    def raise_together(self, error: TrainkitError | None) -> None:
        """Raise on every rank as soon as one has an error: that of the lowest rank.

        A rank that raised alone would leave the others waiting in their next collective.
        """
        if self.world_size == 1 or not self.any(error is not None):
            if error is not None:
                raise error
            return
        for told in self.gather_json(None if error is None else error.to_json()):
            if told is not None:
                raise error_from_json(told)


def _to_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(content: Tensor) -> Any:
    try:
        return json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise RunFailedError(
            "What another rank has sent is not JSON.",
            why=f"{type(error).__name__}. Ranks of one run send nothing else.",
            fix="Start all ranks with the same version of trainkit, where no stranger can connect to them.",
        ) from None


def _bounded(size: Tensor) -> int:
    number = int(size.item())
    if not 0 < number <= _LONGEST_JSON:
        raise RunFailedError(
            f"Another rank announces a message of {number} bytes.",
            why=f"Ranks of one run send at most {_LONGEST_JSON}.",
            fix="Start all ranks with the same version of trainkit, where no stranger can connect to them.",
        )
    return number


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

    NCCL carries GPU tensors and gloo CPU tensors. A single rank has a process group as well, so that nothing above has
    to distinguish.

    Args:
        use_gpu: train on the GPU of this rank's ``local_rank`` among the visible ones, else on CPU.
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
        device = torch.device("cuda", device_index(env.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)  # before NCCL starts, or every rank opens a context on GPU 0
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(intra_op_threads(env))
    # Kept here for as long as torch works with it: it holds no reference to the Python half of a store.
    name, place = met or ("", None)
    if env.world_size == 1:
        place = HashStore()  # alone: no port, so none in use
    elif place is None:
        place = meet(env, secret, timeout)
    with interfaces_set(env, place, named=interface):
        c10d.init_process_group(
            "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
            store=PrefixStore(name, place) if name else place,
            rank=env.rank,
            world_size=env.world_size,
            timeout=collective_timeout or timeout,
            device_id=device if use_gpu else None,
        )
        try:
            dist = Distributed(env, device)
            with nullcontext() if use_gpu else sharing_cores():
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
