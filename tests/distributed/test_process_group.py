"""When the ranks agree to stop, and how often they ask one another."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as c10d

from tests.rank_functions import rank_env, run_ranks
from trainkit.distributed.process_group import FIRST, MOST_APART, Distributed, StopVote, distributed
from trainkit.errors import RunFailedError
from trainkit.ranks import RankEnv, free_port


def _join_without_the_others(env: RankEnv) -> str:
    named = replace(env, world_size=4, local_world_size=2, num_nodes=2, hosts=("n1", "n2"))
    try:
        with distributed(named, use_gpu=False, timeout=timedelta(seconds=3)):
            return "joined"
    except RunFailedError as error:
        return error.what


def test_a_join_that_times_out_names_the_ranks_and_hosts_that_are_missing() -> None:
    first, second = run_ranks(2, _join_without_the_others)
    assert "2 of 4 ranks did not join" in first
    assert "rank 2 on n2, rank 3 on n2" in first
    assert "rank 2 on n2" in second or "Rank 0 at 127.0.0.1" in second  # whoever's time is over first


def test_a_rank_that_cannot_reach_rank_0_says_where_it_looked() -> None:
    port = free_port()
    with (
        pytest.raises(RunFailedError, match=f"127.0.0.1:{port}"),
        distributed(rank_env(1, 2, port), use_gpu=False, timeout=timedelta(seconds=2)),
    ):
        pass


ASKED = FIRST + 50


def _talk(dist: Distributed) -> list[object]:
    counts = dist.all_reduce_sum(torch.tensor(2**40 + dist.rank))
    agreed = [dist.any(dist.rank == 1), dist.any(False)]
    return [*agreed, int(counts), dist.broadcast_json(f"from rank {dist.rank}"), dist.gather_json(dist.rank)]


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
        assert _talk(dist) == [True, False, 2 * 2**40 + 1, "from rank 0", [0, 1]]
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


def test_ranks_agree_stop_at_the_same_poll_and_fast_polls_are_not_all_votes() -> None:
    with distributed(RankEnv.single(), use_gpu=False) as alone:  # which needs no port
        assert alone.broadcast_json("x") == "x"
    (stops, fast, slow), other = run_ranks(2, _polls)
    assert other == (stops, fast, slow)
    assert stops[0] == 3
    assert ASKED < stops[1] <= ASKED + MOST_APART
    assert fast <= 12
    assert slow == 19
