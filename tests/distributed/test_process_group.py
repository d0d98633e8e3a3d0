"""When the ranks agree to stop, how often they ask one another, and what they say when they hang."""

import ctypes
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as c10d

from tests.fork_server import Fork, server
from tests.rank_functions import rank_env, run_ranks
from tests.runs import wait_until
from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import is_hang
from trainkit.common.errors import RunFailedError
from trainkit.common.hosts import free_port
from trainkit.distributed import watchdog as module
from trainkit.distributed.process_group import FIRST, MOST_APART, Distributed, StopVote, distributed
from trainkit.distributed.watchdog import Pulse, Stand, verdict, watchdog
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of


def _join_without_the_others(env: RankEnv) -> str:
    named = replace(env, world_size=4, local_world_size=2, num_nodes=2, hosts=("n1", "n2"))
    with pytest.raises(RunFailedError) as caught, distributed(named, use_gpu=False, timeout=timedelta(seconds=3)):
        pass
    return caught.value.what


def test_a_join_that_times_out_names_who_is_missing_and_where_it_looked() -> None:
    alone = distributed(rank_env(1, 2, port := free_port()), use_gpu=False, timeout=timedelta(seconds=2))
    with pytest.raises(RunFailedError, match=f"127.0.0.1:{port}"), alone:
        pass
    first, second = run_ranks(2, _join_without_the_others)
    assert "2 of 4 ranks did not join" in first
    assert "rank 2 on n2, rank 3 on n2" in first
    assert "rank 2 on n2" in second or "Rank 0 at 127.0.0.1" in second  # whoever's time is over first


ASKED = FIRST + 50


def _talk(dist: Distributed) -> list[object]:
    counts = dist.all_reduce_sum(torch.tensor(2**40 + dist.rank))
    agreed = [dist.any(dist.rank == 1), dist.any(False)]
    sent = [dist.broadcast_json(f"from rank {dist.rank}"), dist.gather_json(dist.rank)]
    return [*agreed, int(counts), *sent, dist.from_main(lambda: b""), dist.from_main(lambda: b"abc")]


def _polls(env: RankEnv) -> tuple[list[int], int, int]:
    """The polls that say stop, where rank 1 asks early and where it asks late; votes of 160 polls that are 12 ms apart,
    and of 19 that are 300 ms apart."""
    now = 0.0

    def poll(vote: StopVote, *, asks: bool = False, seconds: float = 0.012) -> bool:
        nonlocal now
        now += seconds
        return vote.poll(asks)

    with distributed(env, use_gpu=False) as dist, mock.patch.object(time, "monotonic", side_effect=lambda: now):
        assert _talk(dist) == [True, False, 2 * 2**40 + 1, "from rank 0", [0, 1], b"", b"abc"]
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


# Ranks that hang: what they say, and of whom.

HOSTS = ("n1", "n2")


def augment_for_ever() -> None:
    time.sleep(60)


def keep_the_lock() -> None:
    ctypes.PyDLL(None).sleep(60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def watched(env: RankEnv, run: RunDir, hang_seconds: float) -> Iterator[tuple[Any, Any, Path]]:
    """Give the beat of a watched rank, its barrier, and its logs."""
    attempt = Attempt(run, 0)
    with (
        distributed(env, use_gpu=False) as dist,
        watchdog(attempt, env.rank, HOSTS, hang_seconds=hang_seconds, beats_per_step=1) as beat,
    ):
        yield beat, dist.barrier, attempt.logs


def test_where_output_is_captured_the_watch_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook stderr is no file."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    attempt = Attempt.begin(RunDir.create(tmp_path / "run", "seed: 0\n"))
    with watchdog(attempt, 0, HOSTS[:1], hang_seconds=2, beats_per_step=1) as beat:
        for _ in range(3):
            beat()
            time.sleep(0.2)
        assert "watchdog" in [thread.name for thread in threading.enumerate()]


def _train(env: RankEnv, run: RunDir, stuck: Any) -> None:
    attempt = Attempt(run, 0)
    os.dup2(os.open(attempt.logs / f"rank-{env.rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    module.GATHER_SECONDS = 1.0
    with watched(env, run, 1) as (beat, barrier, _):
        for _ in range(30):  # longer than a hang
            beat()
            barrier()
            time.sleep(0.05)
        beat()
        if env.rank == 1:
            stuck()
        barrier()


@contextmanager
def two_ranks(function: Any, run: RunDir, *args: Any) -> Iterator[list[Fork]]:
    port = free_port()
    ranks = [server().start(function, rank_env(rank, 2, port), run, *args) for rank in range(2)]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


HANGS = {
    augment_for_ever: (1, "behind the others: rank 1 on n2, which stands at .* in augment_for_ever"),
    keep_the_lock: (1, ""),
    stop: (None, "says nothing"),
}
"""Way in which the second rank misses a collective -> its exit code, and the words on it."""


@pytest.mark.nightly
def test_the_rank_that_does_not_come_is_named_and_not_the_first_that_waits(tmp_path: Path) -> None:
    with ExitStack() as held:
        attempts = [Attempt.begin(RunDir.create(tmp_path / stuck.__name__, "seed: 0\n")) for stuck in HANGS]
        runs = [
            held.enter_context(two_ranks(_train, attempt.run, stuck))
            for attempt, stuck in zip(attempts, HANGS, strict=True)
        ]
        for first, second in runs:
            first.join(40)
            second.join(5)  # as long as srun gives it
        codes = [[process.exitcode for process in ranks] for ranks in runs]
    for attempt, found, (stuck, (code, words)) in zip(attempts, codes, HANGS.items(), strict=True):
        assert found == [1, code], stuck
        (failure,) = history_of(attempt.run).failures
        assert (failure.rank, failure.host) == (1, "n2")
        assert is_hang(failure.error)
        assert re.search(words, failure.error)
        stacks = [(attempt.logs / f"rank-{rank}.err").read_text() for rank in range(2)]
        assert "in barrier" in stacks[0]
        assert f"in {stuck.__name__}" in stacks[1] or code is None


def test_a_hang_is_five_usual_updates_or_hang_seconds_and_first_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for hang_seconds, first, seconds, usual in ((60, 600, 40, 200), (900, 900, 40, 900), (60, 600, 1, 60)):
        pulse = Pulse(hang_seconds, 3)
        for update in (500, *[seconds] * 9):  # the first one compiles
            for part in (0, 0.1, update - 0.1):
                assert pulse.beats >= 3 or pulse.patience() == first
                now += part
                pulse.beat()
        assert pulse.patience() == pytest.approx(usual)
        now += usual - 1
        assert not pulse.is_over()
        now += 2
        assert pulse.is_over()


@pytest.mark.long
def test_ranks_that_were_suspended_for_longer_than_a_hang_do_not_hang(tmp_path: Path) -> None:
    """SLURM stops jobs that it suspends."""
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    attempt = Attempt.begin(run)
    (attempt.logs / "begun").mkdir()
    with two_ranks(_keep_on, run) as ranks:
        wait_until(lambda: len(list((attempt.logs / "begun").iterdir())) == 2)
        for number, pause in ((signal.SIGSTOP, 8.0), (signal.SIGCONT, 0.0)):
            for process in ranks:
                os.kill(process.pid, number)
            time.sleep(pause)
        for process in ranks:
            process.join(30)
        assert [process.exitcode for process in ranks] == [0, 0]
        assert not history_of(run).failures


def _keep_on(env: RankEnv, run: RunDir) -> None:
    module.LATE_SECONDS = 1.0
    with watched(env, run, 3) as (beat, barrier, logs):
        for index in range(40):
            beat()
            barrier()
            time.sleep(0.1)
            if index == 10:
                (logs / "begun" / str(env.rank)).touch()


AT_WORK, WAITS = Stand(7, False, "model.py:3 in forward"), Stand(7, True, "loop.py:9 in train")


@pytest.mark.parametrize(
    ("stands", "behind"),
    [
        ({0: WAITS, 1: AT_WORK, 2: WAITS}, 1),
        ({0: AT_WORK, 1: AT_WORK, 2: Stand(6, True, "")}, 2),
        ({0: WAITS, 2: AT_WORK}, 1),
        ({0: WAITS, 1: WAITS, 2: WAITS}, None),
        ({0: AT_WORK, 1: AT_WORK, 2: AT_WORK}, None),
        ({0: AT_WORK}, 0),  # alone
    ],
)
def test_behind_is_who_is_silent_or_did_least_or_does_not_wait(stands: dict[int, Stand], behind: int | None) -> None:
    ranks = range(1 if len(stands) == 1 else 3)
    assert verdict(stands, ranks, [f"n{rank}" for rank in ranks])[0] == behind
