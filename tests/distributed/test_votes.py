"""When the ranks agree to stop, and how often they ask one another."""

from __future__ import annotations

from unittest import mock

import torch.distributed as c10d

from tests.rank_functions import run_ranks
from trainkit.distributed.process_group import FIRST, MOST_APART, StopVote, distributed
from trainkit.ranks.env import RankEnv

ASKED = FIRST + 50


def _polls(env: RankEnv) -> tuple[list[int], int, int]:
    """The polls that say stop, where rank 1 asks early and where it asks late; votes of 160 polls that are 12 ms apart,
    and of 19 that are 300 ms apart."""
    now = 0.0

    def poll(vote: StopVote, *, asks: bool = False, seconds: float = 0.012) -> bool:
        nonlocal now
        now += seconds
        return vote.poll(asks)

    with (
        distributed(env, use_gpu=False) as dist,
        mock.patch("trainkit.distributed.process_group.monotonic", side_effect=lambda: now),
    ):
        early, late = StopVote(dist), StopVote(dist)
        first = [poll(early, asks=dist.rank == 1 and number == 2) for number in range(5)].index(True)
        early.finish()
        with mock.patch.object(c10d, "all_reduce", side_effect=c10d.all_reduce) as votes:
            answers = [poll(late, asks=dist.rank == 1 and number >= ASKED) for number in range(FIRST + 160)]
            fast = votes.call_count - FIRST
            for _ in range(MOST_APART + 1):  # whatever was still to come of the fast ones
                poll(late, seconds=0.3)
            votes.reset_mock()
            for _ in range(19):
                poll(late, seconds=0.3)
        late.finish()
        return [first, answers.index(True)], fast, votes.call_count


def test_ranks_stop_at_the_same_poll_and_where_polls_are_fast_not_each_is_a_vote() -> None:
    (stops, fast, slow), other = run_ranks(2, _polls)
    assert other == (stops, fast, slow)
    assert stops[0] == 3
    assert ASKED < stops[1] <= ASKED + MOST_APART
    assert fast <= 12
    assert slow == 19
