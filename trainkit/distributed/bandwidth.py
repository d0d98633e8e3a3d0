"""How fast ranks talk to each other, measured in groups of their own: one that breaks takes no other with it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainkit.errors import RunFailedError

_TIMEOUT = timedelta(seconds=4)
"""Longest wait for one message. gloo tries four times as long to connect: so soon is a link that is down known."""
_GPU_TIMEOUT = timedelta(seconds=20)
"""The same for NCCL, which connects with the first message."""
_LONGEST_SECONDS = 40.0
_ARRIVE = timedelta(seconds=15)
"""Ranks may come to a measurement one after the other: to open a GPU takes seconds."""
_SMALLEST, _LARGEST, _LARGEST_GPU = 1 << 18, 1 << 24, 1 << 28
"""Bytes of a message. It grows until sending it takes `_LONG_ENOUGH`: a slow link is not asked for more."""
_LONG_ENOUGH = 0.05
_REPEATS = 3
"""The best of so many counts: a machine that does something else for a moment is not a slow link."""


class Group:
    """Some ranks, by their global numbers, that talk over a process group made for that."""

    def __init__(self, store: Store, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        self._rank, self._size = list(ranks).index(rank), len(ranks)
        self._device = device
        self._largest = _LARGEST_GPU if device.type == "cuda" else _LARGEST
        place = PrefixStore(name, store)
        gpu = device.type == "cuda"
        kind: Any = c10d.ProcessGroupNCCL if gpu else c10d.ProcessGroupGloo
        self._group = kind(place, self._rank, self._size, _GPU_TIMEOUT if gpu else _TIMEOUT)

    def all_reduce_gb_s(self) -> float:
        """Bus bandwidth of an all-reduce, in GB/s, as nccl-tests count it: 2 (n - 1) / n of the bytes."""
        size, best = _SMALLEST, 0.0
        self._timed_all_reduce(size)  # connections are made by the first
        while True:
            seconds = min(self._timed_all_reduce(size) for _ in range(_REPEATS))
            best = max(best, 2 * (self._size - 1) / self._size * size / seconds / 1e9)
            if seconds >= _LONG_ENOUGH or size >= self._largest:
                return best
            size *= 4

    def one_way_gb_s(self, sender: int, receiver: int) -> float:
        """What the group's rank ``sender`` can send to ``receiver``, in GB/s; for those two; 0.0 for the others."""
        if self._rank not in (sender, receiver):
            return 0.0
        other = receiver if self._rank == sender else sender
        answer = torch.zeros(2, device=self._device)  # the best so far, and the size of the next message
        size, best, long = _SMALLEST, 0.0, 0
        while size:
            message = torch.zeros(size // 4, device=self._device)
            began = time.perf_counter()
            if self._rank == sender:
                self._group.send([message], other, 0).wait()
                self._group.recv([answer], other, 0).wait()
            else:
                self._group.recv([message], other, 0).wait()
                self._finished()
                seconds = time.perf_counter() - began
                best = max(best, size / seconds / 1e9)
                long += seconds > _LONG_ENOUGH or size == self._largest
                bigger = size if seconds > _LONG_ENOUGH else min(4 * size, self._largest)
                answer[0], answer[1] = best, 0 if long == _REPEATS else bigger
                self._group.send([answer], other, 0).wait()
            size = int(answer[1].item())
        return float(answer[0].item())

    def _timed_all_reduce(self, size: int) -> float:
        """Seconds of one all-reduce, on the slowest of the ranks, which all of them return."""
        message = torch.zeros(size // 4, device=self._device)
        began = time.perf_counter()
        self._reduce(message)
        seconds = torch.tensor([time.perf_counter() - began], device=self._device)
        self._reduce(seconds, c10d.ReduceOp.MAX)
        return float(seconds.item())

    def _reduce(self, tensor: Tensor, op: Any = c10d.ReduceOp.SUM) -> None:
        options = c10d.AllreduceOptions()
        options.reduceOp = op
        self._group.allreduce([tensor], options).wait()
        self._finished()

    def _finished(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(store: Store, name: str, nodes: Sequence[Sequence[int]], rank: int, device: torch.device) -> dict[str, Any]:
    """Bandwidth among the ranks of one node, or of two: all-reduce over all of them, and one way between two nodes.

    Returns ``gb_s`` and, for two nodes, ``there`` and ``back``; or ``error``.
    """
    found: list[dict[str, Any]] = []
    # NCCL may wait for a peer for ever while it connects: then this rank goes on without an answer.
    work = threading.Thread(target=lambda: found.append(_measured(store, name, nodes, rank, device)), daemon=True)
    work.start()
    work.join(_LONGEST_SECONDS)
    return found[0] if found else {"error": f"no answer within {_LONGEST_SECONDS:.0f} s ({socket.gethostname()})"}


def _measured(
    store: Store, name: str, nodes: Sequence[Sequence[int]], rank: int, device: torch.device
) -> dict[str, Any]:
    ranks = [each for node in nodes for each in node]
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        store.set(f"{name}/here/{rank}", "1")
        store.wait([f"{name}/here/{each}" for each in ranks], _ARRIVE)
        group = Group(store, name, ranks, rank, device)
        found = {"gb_s": round(group.all_reduce_gb_s(), 4)}
        if len(nodes) == 2:
            second = len(nodes[0])
            found["there"] = round(group.one_way_gb_s(0, second), 4)
            found["back"] = round(group.one_way_gb_s(second, 0), 4)
        return found
    except (RuntimeError, OSError, RunFailedError) as error:  # gloo and NCCL raise the first for everything
        return {"error": f"{str(error).splitlines()[0][:200]} ({socket.gethostname()})"}


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Who measures with whom, round by round, so that every two of ``count`` nodes meet once and none waits long."""
    if count < 2:
        return []
    # The circle method: one stays, the others move on by one. An odd one out pauses.
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        pairs = [(places[i], places[-1 - i]) for i in range(len(places) // 2)]
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found
