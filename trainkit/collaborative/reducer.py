"""hivemind's all-reduce with a reducer that screens what it is sent before it averages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, BannedException, TensorPartReducer
from torch import Tensor

from trainkit.collaborative.screening import Limits, Screen


class ScreeningReducer(TensorPartReducer):  # type: ignore[misc]
    """Keeps what the senders have sent of a part until all of it is there, and averages what passes the screen."""

    def __init__(self, own_parts: Sequence[Tensor], num_senders: int, screen: Screen) -> None:
        """
        Args:
            own_parts: this peer's own, as views of the whole vector.
        """
        self._own, self._screen = own_parts, screen
        self._arrived: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}
        super().__init__(tuple(part.shape for part in own_parts), num_senders)

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float = 1.0
    ) -> Tensor:
        """Take a part, wait for the others' of it, return the average."""
        # hivemind says so by assertions, which would take a sender's mistake for ours.
        if not (0 <= sender_index < self.num_senders and 0 <= part_index < self.num_parts):
            raise BannedException(f"sender {sender_index} has sent a part {part_index} that does not exist")
        self.num_parts_received[sender_index] += 1
        while part_index > self.current_part_index:
            finished = asyncio.ensure_future(self.finished.wait())
            await asyncio.wait({self.current_part_future, finished}, return_when=asyncio.FIRST_COMPLETED)
            finished.cancel()
            if self.finished.is_set():
                raise AllreduceException("the averaging is over")
        if self.sender_failed_after[sender_index] != float("inf"):
            raise BannedException(f"sender {sender_index} has failed before")
        future = self.current_part_future
        # Kept as it is, whatever it is: it counts as arrived, or the others would wait for a sender that lies. Without
        # weight the sender has left it out, see `exchange`: there is nothing to judge.
        if weight != 0.0:
            self._arrived[sender_index], self._weights[sender_index] = tensor_part, weight
        self.current_part_accumulated_from += 1
        self.check_current_part_finished()
        average: Tensor = await future
        return average

    def check_current_part_finished(self) -> None:
        """Average as soon as nobody is missing."""
        if self.current_part_accumulated_from == self.num_current_senders:
            own = self._own[self.current_part_index]
            average = torch.zeros_like(own)
            if self._arrived:
                average = self._screen.average(int(own.storage_offset()), self._arrived, self._weights, own)
            self._arrived, self._weights = {}, {}
            self.current_part_future.set_result(average)
            self.reset_accumulators()


def install_screen(runner: AllReduceRunner, limits: Limits, num_parameters: int) -> Screen:
    """Let this peer's part of the vector in an all-reduce, that has not begun, be averaged by a `ScreeningReducer`."""
    screen = Screen([str(peer) for peer in runner.sender_peer_ids], limits, num_parameters)
    runner.tensor_part_reducer = ScreeningReducer(runner.parts_for_local_averaging, len(runner.sender_peer_ids), screen)
    return screen
