"""``python -m trainkit.distributed.health``: one rank of a check of nodes. Rank 0 prints what all found.

Started like a training (srun, torchrun, ...), and judged by `trainkit.cluster.node_health`. Ranks talk over a store,
and over groups of two nodes at most: a node that is not there, or a link that is down, spoils no other's result.
"""

import json
import os
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from trainkit.cluster import node_health
from trainkit.cluster.node_health import node_facts
from trainkit.cluster.ranks import RankEnv, Secret
from trainkit.common import terminal
from trainkit.common.errors import RunFailedError, TrainkitError
from trainkit.common.process import run_program, set_variables
from trainkit.config.loading import load
from trainkit.distributed import device as devices
from trainkit.distributed.rendezvous import SealedStore, interfaces_set, meet

_TIMEOUT = timedelta(seconds=4)
"""Longest wait for one message. gloo tries four times as long to connect: so soon is a link that is down known."""
_GPU_TIMEOUT = timedelta(seconds=20)
"""The same for a GPU's backend, which connects with the first message."""
_LONGEST_SECONDS = 40.0
_ARRIVE = timedelta(seconds=15)
"""Ranks may come to a measurement one after the other: to open a GPU takes seconds."""
_SMALLEST = 1 << 18
_LARGEST = 1 << 24
_LARGEST_GPU = 1 << 28
"""Bytes of a message. It grows until sending it takes `_LONG_ENOUGH`: a slow link is not asked for more."""
_LONG_ENOUGH = 0.05
_REPEATS = 3
"""The best of this many trials counts: a machine that is busy for a moment is not a slow link."""
_PRODUCTS = 5
"""Times that a product is computed: one that comes out differently is a fault."""


def all_reduce_gb_s(group: Any, size: int, device: torch.device) -> float:
    """Bus bandwidth of an all-reduce among ``size`` ranks, in GB/s, as nccl-tests count it: 2 (n - 1) / n of the bytes.

    The best of all sizes of a message, each by the slowest of the ranks.
    """
    best = 0.0
    number = _SMALLEST
    largest = _LARGEST if device.type == "cpu" else _LARGEST_GPU
    _timed_all_reduce(group, number, device)  # connections are made by the first
    while True:
        seconds = min(_timed_all_reduce(group, number, device) for _ in range(_REPEATS))
        best = max(best, number / seconds / 1e9)
        if seconds >= _LONG_ENOUGH or number >= largest:
            return best * 2 * (size - 1) / size
        number *= 4


def _timed_all_reduce(group: Any, number: int, device: torch.device) -> float:
    """Seconds that the transfer takes on the slowest rank."""
    message = torch.zeros(number // 4, device=device)
    options = c10d.AllreduceOptions()
    began = time.perf_counter()
    group.allreduce([message], options).wait()
    devices.synchronize(device)
    seconds = torch.tensor([time.perf_counter() - began], device=device)
    options.reduceOp = c10d.ReduceOp.MAX
    group.allreduce([seconds], options).wait()
    return float(seconds.item())


def measure(store: Store, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> dict[str, Any]:
    """Bandwidth among some ranks, by their global numbers, one of which is ``rank``: ``gb_s``, or ``error``.

    They talk over a process group of their own: one that breaks takes no other with it.
    """
    found: dict[str, Any] = {}

    def work() -> None:
        try:
            patience = _TIMEOUT
            if device.type != "cpu":
                patience = _GPU_TIMEOUT
                devices.make_current(device)
            store.set(f"{name}/here/{rank}", "1")
            store.wait([f"{name}/here/{each}" for each in ranks], _ARRIVE)
            group = devices.open_group(device, PrefixStore(name, store), list(ranks).index(rank), len(ranks), patience)
            found["gb_s"] = round(all_reduce_gb_s(group, len(ranks), device), 4)
        except (RuntimeError, OSError, RunFailedError) as error:  # backends raise the first for everything
            found["error"] = f"{str(error).splitlines()[0][:200]} ({socket.gethostname()})"

    # A GPU's backend may wait for a peer for ever while it connects: then this rank goes on without an answer.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_LONGEST_SECONDS)
    return dict(found) or {"error": f"no answer within {_LONGEST_SECONDS:.0f} s ({socket.gethostname()})"}


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pair nodes round by round: every two of ``count`` meet once, and none waits long."""
    if count < 2:
        return []
    # The circle method: one stays, the others move on by one. An odd one out pauses.
    others = [*range(1, count + count % 2)]
    found = []
    for _ in others:
        circle = [0, *others]
        pairs = [tuple(sorted((circle[i], circle[-1 - i]))) for i in range(len(circle) // 2)]
        found.append([(first, second) for first, second in pairs if second < count])
        others = [others[-1], *others[:-1]]
    return found


START_SECONDS = 30.0
"""Seconds after the first rank by which the others must be there."""
_ROUND_SECONDS = 20.0
_LAST_SECONDS = 5.0
_ROUNDS = 8
"""Most other nodes that a node is measured with."""
_LOST = (RunFailedError, RuntimeError)


def main(env: Mapping[str, str]) -> int:
    """One rank's part. Rank 0 prints the report, as one line of JSON, and does not judge it."""
    try:
        report = run(RankEnv.from_mapping(env), env)
    except TrainkitError as error:
        terminal.warn(str(error))
        return error.exit_code
    except _LOST as error:
        terminal.warn(f"{os.uname().nodename}: lost rank 0: {str(error).splitlines()[0]}")
        return 1
    if report is not None:
        terminal.say(json.dumps(report | {"time": time.time()}))
    return 0


def run(rank_env: RankEnv, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Measure; rank 0 gets what all ranks found, the others None."""
    me = rank_env.rank
    secret = Secret.from_mapping(env)
    run_dir = env.get("TRAINKIT_RUN_DIR")
    node = os.uname().nodename
    if rank_env.hosts:
        node = rank_env.hosts[rank_env.node_rank]
    facts: dict[str, Any] = {"node": node, "node_rank": rank_env.node_rank, "local_rank": rank_env.local_rank}
    if rank_env.local_rank == 0:
        folder = run_dir or env.get(node_health.FOLDER) or "."
        facts |= node_facts([Path(folder), Path(tempfile.gettempdir())])
        facts["gpus"] = facts["gpus"] or devices.devices_here()  # Intel's, and those of plugins, have no library to ask
    store = SealedStore(HashStore(), secret)
    if rank_env.world_size > 1:
        store = meet(rank_env, secret, timedelta(seconds=START_SECONDS + 10), wait_for_all=False)
    store.set(f"facts/{me}", json.dumps(facts))
    report: dict[str, Any] = {}
    if rank_env.is_main:
        report["ranks"] = _collect(store, "facts/", range(rank_env.world_size), START_SECONDS)
        report["missing"] = {}
        for rank in range(rank_env.world_size):
            if str(rank) not in report["ranks"]:
                report["missing"][str(rank)] = _host_of(rank, rank_env)
        store.set("roster", json.dumps(report["ranks"]))
    roster = json.loads(store.get("roster"))
    if str(me) not in roster:  # too late
        return None
    by_node: dict[int, list[int]] = {}
    for rank in sorted(map(int, roster)):
        by_node.setdefault(roster[str(rank)]["node_rank"], []).append(rank)
    nodes = [by_node[number] for number in sorted(by_node)]
    _clocks(store, me, nodes, report)
    # The interface that the run's configuration names, if this is a job's preflight.
    interface = run_dir and load(f"{run_dir}/config.yaml").config.launch.interface
    with interfaces_set(rank_env, store, named=interface):
        _measure(store, rank_env, nodes, report)
    if not rank_env.is_main:
        with suppress(*_LOST):  # rank 0 may be out of reach, and says by itself that this rank is
            store.set(f"done/{me}", "1")
        return None
    report["found"] = _collect(store, "found/", roster, _LAST_SECONDS)
    _collect(store, "done/", roster.keys() - {"0"}, _LAST_SECONDS)  # this process serves the store
    return report


def _host_of(rank: int, env: RankEnv) -> str:
    node = rank // max(1, env.local_world_size)
    return env.hosts[node] if node < len(env.hosts) else f"rank {rank}"


def _measure(store: SealedStore, rank_env: RankEnv, nodes: Sequence[Sequence[int]], report: dict[str, Any]) -> None:
    """Products on this rank's device, and bandwidth inside its node and to others."""
    me = rank_env.rank
    device = torch.device("cpu")
    name = "cpu"
    if devices.accelerator() is not None:
        # From here on this rank has a context on its GPU; all nodes have been asked for strangers' before.
        device = devices.device_of_rank(rank_env.local_rank)
        devices.make_current(device)
        name = devices.device_name(device)
    found = matmul_check(device) | {"device": name}
    number = [me in ranks for ranks in nodes].index(True)
    if len(nodes[number]) > 1:
        found["inside"] = measure(store, f"inside/{number}", nodes[number], me, device)
    store.set(f"found/{me}", json.dumps(found))
    report["pairs"] = _pairs(store, me, nodes, device)


def matmul_check(device: torch.device, *, size: int | None = None) -> dict[str, Any]:
    """Multiply matrices whose product is known: ``checksum`` of it, and how often it came out ``wrong``.

    They hold small whole numbers, so that every sum is exact in any order and at any precision that a GPU may use. A
    checksum that differs is thus a fault, also between different machines.
    """
    size = size or (512 if device.type == "cpu" else 4096)
    rows = torch.arange(size, device=device)
    a = ((rows[:, None] * 7 + rows[None, :] * 3) % 11 - 5).float()
    b = ((rows[:, None] * 5 + rows[None, :] * 13) % 7 - 3).float()
    # Sums of its columns, which whole numbers tell without the product.
    expected = (devices.as_float64(a.sum(0)) @ devices.as_float64(b)).cpu()
    checksums = []
    wrong = 0
    for _ in range(_PRODUCTS):
        product = torch.matmul(a, b)
        wrong += int(not torch.equal(devices.as_float64(product).sum(0).cpu(), expected))
        checksums.append(zlib.crc32(product.cpu().numpy().tobytes()))
    return {"checksum": max(checksums, key=checksums.count), "wrong": wrong, "unsteady": len(set(checksums)) > 1}


def _collect(store: SealedStore, place: str, keys: Iterable[object], seconds: float) -> dict[str, Any]:
    """Values below ``place`` by key, of those that come in time."""
    deadline = time.monotonic() + seconds
    found: dict[str, Any] = {}
    for key in map(str, keys):
        with suppress(*_LOST):
            store.wait([place + key], timedelta(seconds=max(deadline - time.monotonic(), 0.05)))
            found[key] = json.loads(store.get(place + key))
    return found


def _clocks(store: SealedStore, me: int, nodes: Sequence[Sequence[int]], report: dict[str, Any]) -> None:
    """Offset of each node's clock from that of rank 0's node, in seconds."""
    firsts = [ranks[0] for ranks in nodes]
    if me == 0:
        asked = time.time()
        store.set("clock/ask", "1")
        answers = _collect(store, "clock/", firsts[1:], 5.0)
        heard = time.time()
        report["clocks"] = {"0": 0.0}
        for rank, answer in answers.items():  # any time between the two is right: a busy node answers late
            report["clocks"][rank] = round(answer - min(max(answer, asked), heard), 4)
    elif me in firsts:
        with suppress(*_LOST):
            store.wait(["clock/ask"], timedelta(seconds=60))
            store.set(f"clock/{me}", json.dumps(time.time()))


def _pairs(store: SealedStore, me: int, nodes: Sequence[Sequence[int]], device: torch.device) -> list[dict[str, Any]]:
    """Bandwidth between pairs of nodes, until it is clear whose is low; rank 0 says whether another round is needed."""
    found: list[dict[str, Any]] = []
    for number, pairs in enumerate(rounds(len(nodes))[:_ROUNDS]):
        for a, b in pairs:
            ranks = [*nodes[a], *nodes[b]]
            if me in ranks:
                result = measure(store, f"pair/{a}/{b}", ranks, me, device)
                if me == nodes[a][0]:
                    store.set(f"pair/{number}/{a}/{b}", json.dumps(result))
        if me == 0:
            answers = _collect(store, f"pair/{number}/", [f"{a}/{b}" for a, b in pairs], _ROUND_SECONDS)
            for a, b in pairs:
                answer = answers.get(f"{a}/{b}", {"error": "no answer"})
                found.append({"ranks": [nodes[a][0], nodes[b][0]]} | answer)
            store.set(f"more/{number}", json.dumps(number == 0 or bool(node_health.slow(found))))
        try:
            store.wait([f"more/{number}"], timedelta(seconds=2 * _ROUND_SECONDS))
        except _LOST:
            break
        if not json.loads(store.get(f"more/{number}")):  # raises where a stranger has written over it
            break
    return found


if __name__ == "__main__":
    # To NCCL a message that takes too long is the end of the process, unless it is told that this one waits for it.
    set_variables({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"})
    run_program(lambda _, env: main(env))
