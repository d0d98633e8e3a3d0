"""When the ranks agree to stop, and how often they ask one another."""

from __future__ import annotations

import time
from unittest import mock

import torch.distributed as c10d

from tests.rank_functions import run_ranks
from trainkit.distributed.process_group import distributed
from trainkit.distributed.votes import FIRST, MOST_APART, StopVote
from trainkit.ranks.env import RankEnv

ASKED = FIRST + 50
PAUSE_SECONDS = 0.05
"""Here: a quarter of a second each is long for a test."""


def _polls(env: RankEnv) -> tuple[list[int], int, int]:
    """The polls that say stop, where rank 1 asks early and where it asks late; votes of 100 fast and 19 slow polls."""
    shorter = mock.patch("trainkit.distributed.votes.PAUSE_SECONDS", PAUSE_SECONDS)
    with shorter, distributed(env, use_gpu=False) as dist:
        early, late = StopVote(dist), StopVote(dist)
        first = [early.poll(dist.rank == 1 and poll == 2) for poll in range(5)].index(True)
        early.finish()
        with mock.patch.object(c10d, "all_reduce", side_effect=c10d.all_reduce) as votes:
            answers = [late.poll(dist.rank == 1 and poll >= ASKED) for poll in range(FIRST + 100)]
            fast = votes.call_count - FIRST
            late.poll(False)  # whatever was still to come of the fast ones
            for _ in range(MOST_APART):
                late.poll(False)
            votes.reset_mock()
            for _ in range(MOST_APART + 3):
                time.sleep(PAUSE_SECONDS * 1.2)
                late.poll(False)
        late.finish()
        return [first, answers.index(True)], fast, votes.call_count


def test_ranks_stop_at_the_same_poll_and_where_polls_are_fast_not_each_is_a_vote() -> None:
    (stops, fast, slow), other = run_ranks(2, _polls)
    assert other == (stops, fast, slow)
    assert stops[0] == 3
    assert ASKED < stops[1] <= ASKED + MOST_APART
    assert fast < 50
    assert slow >= 3
