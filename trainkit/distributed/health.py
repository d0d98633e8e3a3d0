"""``python -m trainkit.distributed.health``: one rank of a check of nodes. Rank 0 prints what all found.

Started like a training (srun, torchrun, ...), and judged by `trainkit.cluster.check`. Ranks talk over a store, and over
groups of two nodes at most, so that a node that is not there, or a link that is down, spoils no other's result.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError

from trainkit import lifetime
from trainkit.cluster import check
from trainkit.cluster.node_facts import node_facts
from trainkit.config.loading import load
from trainkit.distributed.bandwidth import measure, rounds
from trainkit.distributed.interfaces import interfaces_set
from trainkit.distributed.meeting import SealedStore, meet
from trainkit.errors import RunFailedError, TrainkitError
from trainkit.ranks.env import RankEnv, device_index
from trainkit.ranks.secret import Secret

START_SECONDS = 30.0
"""Ranks that are not there so long after the first one are missing."""
_ROUND_SECONDS, _LAST_SECONDS = 20.0, 5.0
_ROUNDS = 8
"""Nodes are measured with so many others at most."""
_LOST = (DistNetworkError, DistStoreError, RunFailedError, RuntimeError)


def main(env: Mapping[str, str]) -> int:
    """One rank's part. Rank 0 prints the report, as one line of JSON: to judge it is not its business."""
    try:
        rank_env = RankEnv.from_mapping(env)
        report = run(rank_env, env)
    except TrainkitError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except _LOST as error:
        print(f"{os.uname().nodename}: lost rank 0: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1
    if report is not None:
        print(json.dumps(report | {"time": time.time()}), flush=True)
    return 0


def run(rank_env: RankEnv, env: Mapping[str, str]) -> dict[str, Any] | None:
    """Measure; rank 0 gets what all ranks found, the others None."""
    me = rank_env.rank
    node = rank_env.hosts[rank_env.node_rank] if rank_env.hosts else os.uname().nodename
    facts: dict[str, Any] = {"node": node, "node_rank": rank_env.node_rank, "local_rank": rank_env.local_rank}
    if rank_env.local_rank == 0:
        facts |= node_facts(env, _folders(env))
    store = _store(rank_env, env)
    store.set(f"facts/{me}", json.dumps(facts))
    report: dict[str, Any] = {}
    if rank_env.is_main:
        report = _gather(store, rank_env)
        store.set("roster", json.dumps(report["ranks"]))
    roster = json.loads(store.get("roster"))
    nodes = _by_node(roster)
    if me not in [rank for ranks in nodes for rank in ranks]:  # too late
        return None
    _clocks(store, me, nodes, report)
    with interfaces_set(rank_env, store, named=_interface(env)):
        _measure(store, rank_env, nodes, report)
    if not rank_env.is_main:
        _tell(lambda: store.set(f"done/{me}", "1"))
        return None
    ranks = [rank for ranks in nodes for rank in ranks]
    answers = _collect(store, [f"found/{rank}" for rank in ranks], _LAST_SECONDS)
    report["found"] = {key.removeprefix("found/"): value for key, value in answers.items()}
    _collect(store, [f"done/{rank}" for rank in ranks if rank != me], _LAST_SECONDS)  # this process serves the store
    return report


def _measure(store: SealedStore, rank_env: RankEnv, nodes: Sequence[Sequence[int]], report: dict[str, Any]) -> None:
    """Products on this rank's device, and bandwidth inside its node and to others."""
    me, device = rank_env.rank, torch.device("cpu")
    if torch.cuda.is_available():
        # From here on this rank has a context on its GPU; all nodes have been asked for strangers' before.
        device = torch.device("cuda", device_index(rank_env.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    found = matmul_check(device) | {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    mine = next(ranks for ranks in nodes if me in ranks)
    if len(mine) > 1:
        found["inside"] = measure(store, f"inside/{nodes.index(mine)}", [mine], me, device)
    store.set(f"found/{me}", json.dumps(found))
    report |= _pairs(store, rank_env, nodes, device)


def matmul_check(device: torch.device, *, size: int | None = None, repeats: int = 5) -> dict[str, Any]:
    """Multiply matrices whose product is known: ``checksum`` of it, and how often it came out ``wrong``.

    They hold small whole numbers, so that every sum is exact in any order and at any precision that a GPU may use. A
    checksum that differs is thus a fault, also between different machines.
    """
    size = size or (4096 if device.type == "cuda" else 512)
    rows = torch.arange(size, device=device)
    a = ((rows[:, None] * 7 + rows[None, :] * 3) % 11 - 5).float()
    b = ((rows[:, None] * 5 + rows[None, :] * 13) % 7 - 3).float()
    # Sums of its columns, which whole numbers tell without the product.
    expected = (a.sum(0).double() @ b.double()).cpu()
    checksums, wrong = [], 0
    for _ in range(repeats):
        product = torch.matmul(a, b)
        wrong += int(not torch.equal(product.double().sum(0).cpu(), expected))
        checksums.append(zlib.crc32(product.cpu().numpy().tobytes()))
    return {"checksum": max(checksums, key=checksums.count), "wrong": wrong, "unsteady": len(set(checksums)) > 1}


def _interface(env: Mapping[str, str]) -> str | None:
    """The one that the run's configuration names, if this is a job's preflight."""
    run = env.get("TRAINKIT_RUN_DIR")
    return load(f"{run}/config.yaml").config.launch.interface if run else None


def _folders(env: Mapping[str, str]) -> list[Path]:
    run, runs = env.get("TRAINKIT_RUN_DIR"), env.get(check.FOLDER)
    return [Path(run or runs or "."), Path(tempfile.gettempdir())]


def _store(rank_env: RankEnv, env: Mapping[str, str]) -> SealedStore:
    patience = timedelta(seconds=START_SECONDS + 10)
    if rank_env.world_size == 1:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        return SealedStore(HashStore(), Secret.from_mapping(env))
    return meet(rank_env, Secret.from_mapping(env), patience, wait_for_all=False)


def _gather(store: SealedStore, rank_env: RankEnv) -> dict[str, Any]:
    """What every rank says of itself, and which are missing."""
    keys = [f"facts/{rank}" for rank in range(rank_env.world_size)]
    facts = _collect(store, keys, START_SECONDS)
    missing = [rank for rank, key in enumerate(keys) if key not in facts]
    per_node = max(1, rank_env.local_world_size)
    return {
        "ranks": {key.removeprefix("facts/"): value for key, value in facts.items()},
        "missing": {
            str(rank): rank_env.hosts[rank // per_node] if rank // per_node < len(rank_env.hosts) else f"rank {rank}"
            for rank in missing
        },
    }


def _collect(store: SealedStore, keys: Sequence[str], seconds: float) -> dict[str, Any]:
    """Values by key, of those that come in time."""
    deadline = time.monotonic() + seconds
    found: dict[str, Any] = {}
    for key in keys:
        left = max(deadline - time.monotonic(), 0.05)
        try:
            store.wait([key], timedelta(seconds=left))
            found[key] = json.loads(store.get(key))
        except _LOST:
            continue
    return found


def _by_node(roster: Mapping[str, Mapping[str, Any]]) -> list[list[int]]:
    """Ranks of each node; only nodes whose facts are there, in their order."""
    nodes: dict[int, list[int]] = {}
    for rank, facts in sorted(roster.items(), key=lambda item: int(item[0])):
        nodes.setdefault(facts["node_rank"], []).append(int(rank))
    return [nodes[number] for number in sorted(nodes)]


def _clocks(store: SealedStore, me: int, nodes: Sequence[Sequence[int]], report: dict[str, Any]) -> None:
    """How far each node's clock is from that of rank 0's node, in seconds; the quickest of three questions counts."""
    firsts = [ranks[0] for ranks in nodes]
    if me == 0:
        offsets = {"0": 0.0}
        for rank in firsts[1:]:
            tries = []
            for number in range(3):
                asked = time.perf_counter()
                before = time.time()
                store.set(f"clock/ask/{rank}/{number}", "1")
                answer = _collect(store, [f"clock/answer/{rank}/{number}"], 5.0)
                took = time.perf_counter() - asked
                tries += [(took, each - before - took / 2) for each in answer.values()]
            if tries:
                offsets[str(rank)] = round(min(tries)[1], 4)
        report["clocks"] = offsets
    elif me in firsts:
        for number in range(3):
            if not _tell(lambda key=f"clock/ask/{me}/{number}": store.wait([key], timedelta(seconds=60))):  # type: ignore[misc]
                return
            store.set(f"clock/answer/{me}/{number}", json.dumps(time.time()))


def _pairs(
    store: SealedStore, rank_env: RankEnv, nodes: Sequence[Sequence[int]], device: torch.device
) -> dict[str, Any]:
    """Bandwidth between pairs of nodes, until it is clear whose is low; rank 0 says whether another round is needed."""
    me, found = rank_env.rank, []
    for number, pairs in enumerate(rounds(len(nodes))[:_ROUNDS]):
        for a, b in pairs:
            if me in (*nodes[a], *nodes[b]):
                result = measure(store, f"pair/{a}/{b}", [nodes[a], nodes[b]], me, device)
                if me == nodes[a][0]:
                    store.set(f"pair/{number}/{a}/{b}", json.dumps(result))
        if rank_env.is_main:
            keys = [f"pair/{number}/{a}/{b}" for a, b in pairs]
            answers = _collect(store, keys, _ROUND_SECONDS)
            lost = {"error": "no answer"}
            found += [{"ranks": [nodes[a][0], nodes[b][0]]} | answers.get(key, lost)
                      for key, (a, b) in zip(keys, pairs, strict=True)]  # fmt: skip
            more = number == 0 or bool(check.slow(found))
            store.set(f"more/{number}", json.dumps(more))
        elif not _tell(lambda key=f"more/{number}": store.wait([key], timedelta(seconds=2 * _ROUND_SECONDS))):  # type: ignore[misc]
            break
        if not json.loads(store.get(f"more/{number}")):
            break
    return {"pairs": found}


def _tell(action: Callable[[], object]) -> bool:
    """Whether it could be done: rank 0 may be out of reach, and says by itself that this rank is."""
    try:
        action()
    except _LOST:
        return False
    return True


if __name__ == "__main__":
    lifetime.begin()
    # To NCCL a message that takes too long is the end of the process, unless it is told that this one waits for it.
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    lifetime.leave(main(dict(os.environ)))
