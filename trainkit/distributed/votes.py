"""Agreement of the ranks on stopping, saving and the like, which costs next to no waiting."""

from __future__ import annotations

from time import monotonic

import torch
import torch.distributed as c10d
from torch import Tensor

from trainkit.distributed.process_group import Distributed

PAUSE_SECONDS = 0.25
"""Where polls come faster than that, not each of them is a vote:"""
MOST_APART = 16
"""one of so many at least, however fast they are,"""
FIRST = 64
"""and each of the first, until it is known how fast they are."""


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
        self._polls, self._next = 0, 0
        self._apart = 1
        self._began, self._of = monotonic(), 0  # the last vote, and the number of its poll
        self.save = False
        """The vote that this poll has read, if it has: any rank wanted to save."""
        self.news = False
        """The same: any rank has something to tell the others."""
        self.over = 0
        """How far the last rank is, as of the last vote."""

    def poll(self, requested: bool, *, save: bool = False, news: bool = False, over: int = 0) -> bool:
        """Cast this rank's votes; True once an earlier vote of any rank to stop was True."""
        if self._dist.world_size == 1:
            self.save, self.news, self.over = save, news, over
            return requested
        if self._running is not None:
            self.finish()
            self._next = max(self._polls, self._polls + self._apart - 1)
        else:
            self.save = self.news = False
        if self._polls >= self._next:
            # Who has just been heard does not repeat it: the ranks will save, or speak, now.
            asked = [int(requested), int(save and not self.save), int(news and not self.news), -over, self._pace()]
            votes = torch.tensor(asked)
            work = c10d.all_reduce(votes, op=c10d.ReduceOp.MAX, async_op=True)
            assert work is not None
            self._running = (work, votes)
        self._polls += 1
        return self._agreed

    def _pace(self) -> int:
        """After how many polls rank 0 would have the next vote."""
        now, polls = monotonic(), self._polls - self._of
        each = (now - self._began) / max(polls, 1)
        self._began, self._of = now, self._polls
        if not self._dist.is_main or self._polls < FIRST:
            return 1
        return max(1, min(MOST_APART, int(PAUSE_SECONDS / max(each, 1e-9))))

    def finish(self) -> bool:
        """Wait for the vote under way, if any; what has been agreed so far."""
        if self._running is not None:
            work, votes = self._running
            work.wait()
            self._running = None
            stop, save, news, behind, self._apart = votes.tolist()
            self._agreed, self.save, self.news = self._agreed or bool(stop), bool(save), bool(news)
            self.over = -behind
        return self._agreed
