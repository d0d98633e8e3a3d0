"""All ranks of the job: rank 0 gives the orders, one at a time, and those whom an order names carry it out.

They have met once. Each order runs in a process group of those who take part, which stays for the next one of the same
ranks, and is left when something failed in it: what one arm breaks, the next one does not find. Orders and answers go
over the store where the ranks have met, so who has nothing to do waits without a collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from trainkit.bench.arms import Place
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import TrainkitError
from trainkit.ranks.env import RankEnv
from trainkit.training.oom import is_out_of_memory

Order = dict[str, Any]
"""``work``, ``ranks``, ``overrides`` and whatever that work takes; JSON's own types."""
Perform = Callable[[Distributed, Order], dict[str, Any]]

_PULSE = timedelta(seconds=20)
"""How often a rank that waits for its turn says that it is alive."""
_COLLECTIVE = timedelta(minutes=5)
"""Longest wait in a collective: for a rank that fails alone."""


class ArmFailedError(Exception):
    """What an order has come to, on the rank that failed first."""


class _LeftError(Exception):
    """This rank leaves a group by itself."""


@dataclass
class Team:
    """This rank's part in it.

    Args:
        store: where all ranks have met.
        places: of all ranks, in order.
        perform: carries out an order.
        beat: says that this rank is alive.
    """

    env: RankEnv
    store: Store
    places: Sequence[Place]
    perform: Perform
    use_gpu: bool
    interface: str | None
    beat: Callable[[], None]

    def __post_init__(self) -> None:
        self._number = self._group = 0
        self._open: tuple[tuple[int, ...], int] | None = None
        self._held = ExitStack()
        self._dist: Distributed | None = None

    def ask(self, order: Order) -> list[dict[str, Any]]:
        """Rank 0: have an order carried out; the answers of those who took part, in order of rank.

        Raises:
            ArmFailedError: it failed; with the reason.
        """
        self._number += 1
        ranks = order["ranks"] or [place.rank for place in self.places]
        self.store.set(f"order/{self._number}", json.dumps({**order, "ranks": ranks, "group": self._group}))
        self._carry_out(self._number, {**order, "ranks": ranks, "group": self._group})
        answers = [json.loads(self._told(f"answer/{self._number}/{rank}")) for rank in ranks]
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            self._group += 1  # nobody uses it again
            raise ArmFailedError(_reason(failed))
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
            self._carry_out(self._number, order)

    def _told(self, key: str) -> bytes:
        while True:
            self.beat()
            try:
                self.store.wait([key], _PULSE)
                return bytes(self.store.get(key))
            except DistStoreError:  # not yet
                continue

    def _carry_out(self, number: int, order: Order) -> None:
        if self.env.rank not in order["ranks"]:
            self._leave(order["group"])  # no group may wait for this rank while the others are busy elsewhere
            return
        answer: dict[str, Any]
        try:
            answer = self.perform(self._joined(order), order)
        except Exception as error:
            answer = {"error": _told_of(error), "time": time.time(), "rank": self.env.rank}
            answer["weight"] = 2 if is_out_of_memory(error) else 1 if isinstance(error, TrainkitError) else 0
            self._leave(None)
        self.store.set(f"answer/{number}/{self.env.rank}", json.dumps(answer))

    def _joined(self, order: Order) -> Distributed:
        key = (tuple(order["ranks"]), int(order["group"]))
        if self._open != key or self._dist is None:
            self._leave(key[1])
            name = f"group/{key[1]}/{self._number}"
            env = env_among(self.env, self.places, order["ranks"])
            self._dist = self._held.enter_context(
                distributed(
                    env, use_gpu=self.use_gpu, interface=self.interface, collective_timeout=_COLLECTIVE,
                    met=(name, self.store),
                )
            )  # fmt: skip
            self._open = key
        return self._dist

    def _leave(self, group: int | None) -> None:
        """Leave the group, together with its other ranks if it is still ``group``; else without a word to them."""
        held, together = self._held, self._open is not None and self._open[1] == group
        self._held, self._dist, self._open = ExitStack(), None, None
        if together:
            held.close()
            return
        with suppress(_LeftError):  # an error on the way out: no barrier, at which some may never arrive
            held.__exit__(_LeftError, _LeftError(), None)


def env_among(env: RankEnv, places: Sequence[Place], ranks: Sequence[int]) -> RankEnv:
    """This rank's place among those that take part."""
    chosen = [places[rank] for rank in ranks]
    nodes = sorted({place.node_rank for place in chosen})
    mine = [place.rank for place in chosen if place.node_rank == env.node_rank]
    return replace(
        env,
        rank=list(ranks).index(env.rank),
        world_size=len(ranks),
        local_rank=mine.index(env.rank),
        local_world_size=len(mine),
        node_rank=nodes.index(env.node_rank),
        num_nodes=len(nodes),
        hosts=tuple(env.hosts[node] for node in nodes) if env.hosts else (),
    )


def _told_of(error: Exception) -> str:
    if isinstance(error, TrainkitError):
        return f"{error.what} {error.why}".strip()
    lines = str(error).strip().splitlines()
    first = " ".join(lines[0].split())[:300] if lines else ""
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {first}" if first else kind


def _reason(failed: Sequence[dict[str, Any]]) -> str:
    """Of several ranks' errors the one that tells most: others only say that they have lost that rank."""
    return str(min(failed, key=lambda one: (-one["weight"], one["time"]))["error"])
