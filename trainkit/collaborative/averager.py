"""hivemind's averager as a peer uses it: its subclass, and the process in which it lives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.compression import Float16Compression, NoCompression
from hivemind.utils.asyncio import as_aiter, azip, enter_asynchronously
from torch import Tensor

from trainkit.collaborative import processes
from trainkit.collaborative.dht import SwarmDHT
from trainkit.collaborative.guarding import GuardedAverager
from trainkit.collaborative.outer import OuterState
from trainkit.config.schema import CollaborativeConfig

# A round has failed if no group is found within so many seconds after its end.
GRACE = 2.0


class _Averager(GuardedAverager):
    """hivemind's averager. Its class name is part of the protocol between peers."""

    outer: OuterState

    def run(self) -> None:
        processes.become_helper(self._parent_pid)
        super().run()

    def get_current_state(self) -> tuple[dict[str, Any], tuple[Tensor, Tensor], None]:
        outer = self.outer
        with outer.lock:
            return {"round": outer.round, "age": outer.age}, (outer.theta.clone(), outer.momentum.clone()), None

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **options: Any) -> Any:
        """hivemind's, but for how it reads what the members say, and for the screen."""
        group = self.read_group(group_info)
        modes = tuple(AveragingMode(member.mode) for member in group.values())
        bandwidths = [
            member.bandwidth if mode != AveragingMode.CLIENT else 0.0
            for member, mode in zip(group.values(), modes, strict=True)
        ]
        fractions = load_balance_peers(self.total_size, bandwidths, min_vector_size)
        try:
            async with enter_asynchronously(self.get_tensors()) as tensors:
                runner = AllReduceRunner(
                    p2p=self._p2p,
                    servicer_type=type(self),
                    prefix=self.prefix,
                    tensors=tensors,
                    group_id=group_info.group_id,
                    ordered_peer_ids=group_info.peer_ids,
                    peer_fractions=fractions,
                    modes=modes,
                    **options,
                )
                screen = await self.screen(runner)
                self._running_groups[group_info.group_id].set_result(runner)
                async for tensor, update in azip(as_aiter(*tensors), runner):
                    tensor.add_(update)
                self.report(runner, screen)
            return {peer: member.about.model_dump() for peer, member in group.items()}
        except Exception as error:
            raise MatchmakingException(f"Unable to run All-Reduce: {error}") from error


@contextmanager
def open_averager(dht: SwarmDHT, outer: OuterState, config: CollaborativeConfig, run_id: str) -> Iterator[Any]:
    """Start the averager; on leaving, end its process.

    Open it before the first use of CUDA: the process is forked.
    """
    client = bool(dht.node.client_mode)
    interrupt = signal.getsignal(signal.SIGINT)
    averager = _Averager(
        [torch.zeros_like(outer.theta)],
        dht.node,
        start=False,
        prefix=f"{run_id}_outer",
        min_matchmaking_time=config.matchmaking_seconds,
        request_timeout=min(1.0, config.matchmaking_seconds / 2),
        compression=Float16Compression() if config.compression == "fp16" else NoCompression(),
        state_compression=NoCompression(),
        client_mode=client,
        allow_state_sharing=False,
        allreduce_timeout=max(GRACE, config.round_seconds - config.matchmaking_seconds),
        next_chunk_timeout=min(10.0, max(1.0, config.round_seconds / 4)),
        shutdown_timeout=2.0,
        daemon=True,
        admission=None,
        num_parameters=outer.num_parameters,
    )
    averager.outer = outer
    try:
        averager.run_in_background(await_ready=True, timeout=30.0)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # hivemind has switched Ctrl-C off in this process
        yield averager
    finally:
        mine = processes.family(averager.pid)
        with suppress(OSError, ValueError):
            averager.shutdown()
        processes.end(mine)
