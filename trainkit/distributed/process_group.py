"""The process group: joined with names, left together."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from trainkit.distributed.device import intra_op_threads
from trainkit.errors import RunFailedError, TrainkitError, error_from_json
from trainkit.ranks.env import RankEnv, device_index

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


class StopVote:
    """Agreement on stopping that costs no waiting: each poll starts a vote and reads the one before it.

    A stop request is thus seen one poll later, by all ranks at the same poll. Every rank must poll equally often.
    """

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._running: tuple[c10d.Work, Tensor] | None = None
        self._agreed = False

    def poll(self, requested: bool) -> bool:
        """Cast this rank's vote; True once an earlier vote of any rank was True."""
        if self._dist.world_size == 1:
            return requested
        self.finish()
        votes = torch.tensor([int(requested)])
        work = c10d.all_reduce(votes, op=c10d.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._running = (work, votes)
        return self._agreed

    def finish(self) -> bool:
        """Wait for the vote under way, if any; what has been agreed so far."""
        if self._running is not None:
            work, votes = self._running
            work.wait()
            self._running = None
            self._agreed = self._agreed or bool(votes.item())
        return self._agreed


@contextmanager
def distributed(env: RankEnv, *, use_gpu: bool, timeout: timedelta = timedelta(minutes=10)) -> Iterator[Distributed]:
    """Join the other ranks, and leave together with them.

    NCCL carries GPU tensors and gloo CPU tensors. A single rank has a process group as well, so that nothing above has
    to distinguish.

    Args:
        use_gpu: train on the GPU of this rank's ``local_rank`` among the visible ones, else on CPU.
        timeout: longest wait for the others, at the start and in any collective.

    Raises:
        RunFailedError: ranks are missing when the time is over; it names them and their hosts.
    """
    device = torch.device("cpu")
    if use_gpu:
        device = torch.device("cuda", device_index(env.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)  # before NCCL starts, or every rank opens a context on GPU 0
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(intra_op_threads(env))
    store = _join(env, timeout)
    c10d.init_process_group(
        "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
        device_id=device if use_gpu else None,
    )
    try:
        dist = Distributed(env, device)
        yield dist
        # On a clean exit only: a rank that leaves early can abort the others while the interpreter shuts down; after
        # an exception the others may never arrive, and waiting would turn a crash into a hang.
        dist.barrier()
    finally:
        # A sharded model is full of cycles and holds the group; its threads would outlive it, ask for the interpreter
        # lock while the interpreter shuts down, and abort the process (1 of 14 two-rank FSDP runs over gloo).
        gc.collect()
        c10d.destroy_process_group()


def _join(env: RankEnv, timeout: timedelta) -> Store:
    """A store that all ranks have reached."""
    store: Store
    if env.world_size == 1:
        return HashStore()  # no port: two debug runs on one machine never collide
    try:
        if env.launcher == "torchrun":
            # torchrun's agent already serves the store at MASTER_PORT; torch knows whether and under which prefix.
            store, _, _ = next(rendezvous("env://", env.rank, env.world_size, timeout=timeout))
        else:
            store = TCPStore(
                env.master_addr,
                env.master_port,
                is_master=env.rank == 0,
                timeout=timeout,
                wait_for_workers=False,
            )
    except (c10d.DistNetworkError, c10d.DistStoreError) as error:
        if env.rank == 0:
            raise RunFailedError(
                f"Rank 0 cannot open {env.master_addr}:{env.master_port} for the other ranks.",
                why=str(error).splitlines()[0],
                fix="Free that port or set another MASTER_PORT; MASTER_ADDR must be an address of this machine.",
            ) from None
        raise RunFailedError(
            f"Rank {env.rank} on {socket.gethostname()} did not reach rank 0 at {env.master_addr}:{env.master_port} "
            f"within {timeout.total_seconds():.0f} s.",
            why="Rank 0 never started, runs elsewhere, or a firewall is between the nodes.",
            fix=f"See rank 0's log, and check that {env.master_addr} resolves and answers from {socket.gethostname()}.",
        ) from None
    store.set_timeout(timeout)
    store.set(f"joined/{env.rank}", socket.gethostname())
    keys = [f"joined/{rank}" for rank in range(env.world_size)]
    try:
        store.wait(keys, timeout)
    except (c10d.DistStoreError, c10d.DistNetworkError):
        raise _missing_ranks(store, keys, env, timeout) from None
    return store


def _missing_ranks(store: Store, keys: list[str], env: RankEnv, timeout: timedelta) -> RunFailedError:
    head = f"{env.master_addr}:{env.master_port}"
    try:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except (c10d.DistStoreError, c10d.DistNetworkError):
        return RunFailedError(
            f"Rank 0 at {head} went away while rank {env.rank} waited for the others.",
            why="It gave up waiting, or died.",
            fix="Its log says why, and which ranks were missing.",
        )
    return RunFailedError(
        f"{len(missing)} of {env.world_size} ranks did not join within {timeout.total_seconds():.0f} s: "
        f"{', '.join(f'rank {rank}{_host_of(rank, env)}' for rank in missing)}.",
        why=f"They never started, died while starting, or cannot reach {head}.",
        fix="See their logs; exclude a bad node with --exclude.",
    )


def _host_of(rank: int, env: RankEnv) -> str:
    node = rank // max(1, env.local_world_size)
    return f" on {env.hosts[node]}" if node < len(env.hosts) else f" on node {node}" if env.num_nodes > 1 else ""
