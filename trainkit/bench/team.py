"""The ranks of a bench: they meet anew for each arm, among some of the job's."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from trainkit.bench.base import Place
from trainkit.bench.rank import Order, Worker
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import RefusedError, TrainkitError, UserError
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.training.batch_size import is_out_of_memory

_SAID = 4096
"""Characters of an error, from its end, that rank 0 is told."""
_PULSE = timedelta(seconds=20)
"""Interval at which a rank that waits for an order says that it is alive."""
_COLLECTIVE = timedelta(minutes=5)
"""Longest wait in a collective: for a rank that fails alone."""


class ArmFailedError(Exception):
    """An order failed; the words of the rank that failed first."""

    def __init__(self, why: str, *, refused: bool = False, raised: str = "") -> None:
        super().__init__(why)
        self.refused = refused
        """It does not go with these settings, or this place."""
        self.raised = raised
        """The error as Python prints it, without what led to it; empty for the kit's own."""


@dataclass
class Team:
    """This rank among all of the job: rank 0 asks, the others serve. ``store``: where they have met."""

    worker: Worker
    store: Store
    places: Sequence[Place]
    use_gpu: bool
    interface: str | None

    def __post_init__(self) -> None:
        self._number = self._group = 0
        self._open: tuple[list[int], int, Distributed] | None = None
        self._held = ExitStack()

    def ask(self, order: Order) -> list[dict[str, Any]]:
        """Rank 0: have an order carried out; the answers of those who took part, in order of rank.

        Raises:
            ArmFailedError: it failed; with the reason.
        """
        self._number += 1
        order = {**order, "group": self._group}
        self.store.set(f"order/{self._number}", json.dumps(order))
        self._carry_out(order)
        answers = []
        failed = []
        for rank in order["ranks"]:
            answer = json.loads(self._told(f"answer/{self._number}/{rank}"))
            answers.append(answer)
            if "error" in answer:
                failed.append(answer)
        if failed:
            self._group += 1  # nobody uses it again
            # The error that tells most: the other ranks only say that they have lost that rank.
            first = min(failed, key=lambda one: (-one["weight"], one["time"]))
            raise ArmFailedError(first["error"], refused=first["refused"], raised=first["raised"])
        return answers

    def end(self) -> None:
        """Rank 0: there is nothing more to do."""
        self._number += 1
        self.store.set(f"order/{self._number}", json.dumps({"work": None, "group": self._group}))
        self._leave(self._group)

    def serve(self) -> None:
        """All others: carry out orders until there are no more."""
        while True:
            self._number += 1
            order = json.loads(self._told(f"order/{self._number}"))
            if order["work"] is None:
                self._leave(order["group"])
                return
            self._carry_out(order)

    def _told(self, key: str) -> bytes:
        while True:
            self.worker.beat()
            try:
                self.store.wait([key], _PULSE)
                return bytes(self.store.get(key))
            except DistStoreError:  # not yet
                continue

    def _carry_out(self, order: Order) -> None:
        rank = self.worker.env.rank
        if rank not in order["ranks"]:
            self._leave(order["group"])  # no group may wait for this rank while the others are busy elsewhere
            return
        answer: dict[str, Any]
        try:
            answer = getattr(self.worker, f"do_{order['work']}")(self._joined(order), order)
        except Exception as error:
            answer = {"error": _in_words(error), "time": time.time(), "raised": "", "weight": 1}
            answer["refused"] = isinstance(error, RefusedError | UserError)
            if not isinstance(error, TrainkitError):
                answer["raised"] = "".join(traceback.format_exception_only(error))[-_SAID:]
                answer["weight"] = 0
            if is_out_of_memory(error):
                answer["weight"] = 2
            self._leave(None)
        self.store.set(f"answer/{self._number}/{rank}", json.dumps(answer))

    def _joined(self, order: Order) -> Distributed:
        ranks = order["ranks"]
        group = order["group"]
        if self._open is None or self._open[:2] != (ranks, group):
            self._leave(group)
            joining = distributed(
                env_among(self.worker.env, self.places, ranks), use_gpu=self.use_gpu, interface=self.interface,
                collective_timeout=_COLLECTIVE, met=(f"group/{group}/{self._number}", self.store),
            )  # fmt: skip
            self._open = ranks, group, self._held.enter_context(joining)
        return self._open[2]

    def _leave(self, group: int | None) -> None:
        """Leave the group: together with its other ranks if it is still ``group``, else at once."""
        held = self._held
        together = self._open is not None and self._open[1] == group
        self._held = ExitStack()
        self._open = None
        if together:
            held.close()
        else:  # as on an error: without a barrier, at which some may never arrive
            held.__exit__(RuntimeError, RuntimeError("left alone"), None)


def env_among(env: RankEnv, places: Sequence[Place], ranks: Sequence[int]) -> RankEnv:
    """This rank's place among those that take part."""
    nodes = sorted({places[rank].node_rank for rank in ranks})
    mine = [rank for rank in ranks if places[rank].node_rank == env.node_rank]
    hosts = []
    if env.hosts:
        for node in nodes:
            hosts.append(env.hosts[node])
    return replace(
        env, rank=list(ranks).index(env.rank), world_size=len(ranks), local_rank=mine.index(env.rank),
        local_world_size=len(mine), node_rank=nodes.index(env.node_rank), num_nodes=len(nodes),
        hosts=tuple(hosts),
    )  # fmt: skip


def _in_words(error: Exception) -> str:
    if isinstance(error, TrainkitError):
        return f"{error.what} {error.why}".strip()
    first = " ".join(str(error).strip().partition("\n")[0].split())[:300]
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {first}".removesuffix(": ")
