"""Which failures ranks start again for in place, and which are left to their launcher."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainkit.cluster.ranks import Secret
from trainkit.cluster.signals import hang
from trainkit.recovery.channel import Channel
from trainkit.recovery.council import Council, Report, cause, refusal
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir

KILLED = "killed by SIGKILL"
LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"
MISTAKE = "ValueError: a mistake"


def report(rank: int, error: str, host: str = "n1") -> Report:
    return Report(rank, error, host)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """The second attempt of a run."""
    run = RunDir.create(tmp_path / "run", "model: {name: fashion_cnn}\n")
    Attempt.begin(run)
    return Attempt.begin(run)


def test_the_cause_is_the_first_that_is_no_lost_connection() -> None:
    assert cause([report(0, LOST), report(2, KILLED), report(1, MISTAKE)]) == report(2, KILLED)
    assert cause([report(0, LOST), report(1, LOST)]) is None


@pytest.mark.parametrize(
    ("error", "why"), [(KILLED, ""), (hang(600), ""), (LOST, ""), (MISTAKE, "it is an error of the program")]
)
def test_what_another_start_may_mend_is_started_again(attempt: Attempt, error: str, why: str) -> None:
    assert refusal(attempt, report(1, error), ["n1", "n2"]) == why


def test_the_budget_of_a_run_counts_every_start(attempt: Attempt) -> None:
    """As it counts those that a launcher makes."""
    attempt.failed(KILLED, rank=1)
    third = attempt.start_again("4711")
    third.failed(KILLED, rank=1)
    assert refusal(third, report(1, KILLED), ["n1"]) == "2 restarts have not come to a new checkpoint"
    third.saved(10)
    assert refusal(third, report(1, KILLED), ["n1"]) == ""
    fourth = third.start_again("4711")
    fourth.saved(20)
    fourth.failed(KILLED, rank=1)
    assert refusal(fourth, report(1, KILLED), ["n1"]) == "3 attempts have failed"


def test_a_state_that_was_left_in_memory_is_progress_as_a_checkpoint_is(attempt: Attempt) -> None:
    attempt.started(step=40)
    attempt.failed(KILLED, rank=1)
    third = attempt.start_again("4711")
    third.started(step=56)
    third.failed(KILLED, rank=1)
    assert refusal(third, report(1, KILLED), ["n1"]) == ""


def test_a_node_on_which_ranks_have_hung_twice_is_left(attempt: Attempt) -> None:
    for _ in range(2):
        attempt.failed(hang(600), rank=1, host="n2")
    assert refusal(attempt, report(1, hang(600), "n2"), ["n1", "n2"]) == "ranks on n2 have hung before"
    assert refusal(attempt, report(1, hang(600), "n2"), ["n2"]) == "", "there is no other node"


def test_who_was_taken_for_dead_starts_nothing_again(attempt: Attempt) -> None:
    Attempt.begin(attempt.run).started(step=0)
    assert refusal(attempt, report(1, KILLED), ["n1"]) == "another attempt has taken over"


def test_an_attempt_is_followed_through_its_starts_in_place(attempt: Attempt) -> None:
    assert attempt.newest_in_place() == attempt
    after = attempt.start_again("4711")
    assert (after.number, attempt.newest_in_place()) == (2, after)
    with pytest.raises(FileExistsError):
        attempt.start_again("4711")
    assert after.start_again("4711") == attempt.newest_in_place()


# The council itself, and keepers of two ranks

Joins = Callable[[int, str], Channel]
SECRET = Secret("between keepers, and long enough")


@pytest.fixture
def joins(attempt: Attempt) -> Iterator[Joins]:
    """Has the keeper of a rank on a host join."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        council = Council(attempt, 2, "4711", SECRET)
        thread = threading.Thread(target=council.serve, args=(server,), daemon=True)
        thread.start()
        keepers = []

        def join(rank: int, host: str) -> Channel:
            keepers.append(Channel.to("127.0.0.1", server.getsockname()[1], SECRET))
            keepers[-1].send({"join": rank, "host": host})
            return keepers[-1]

        yield join
        for keeper in keepers:
            keeper.close()
        thread.join(20)


def heard(keeper: Channel) -> dict[str, Any]:
    (message,) = keeper.receive()
    return message


def test_a_node_whose_ranks_have_hung_is_left_though_only_they_have_failed(attempt: Attempt, joins: Joins) -> None:
    """There is another one, whose rank still runs."""
    for _ in range(2):
        attempt.failed(hang(600), rank=1, host="n2")
    joins(0, "n1")
    keeper = joins(1, "n2")
    keeper.send({"attempt": attempt.number, "rank": 1, "error": hang(600), "host": "n2"})
    assert heard(keeper)["over"] == "ranks on n2 have hung before"


def test_ranks_hang_by_their_pace_only_when_all_are_in_an_update(attempt: Attempt, joins: Joins) -> None:
    """One that is not may read data, validate or save, and the others wait for it inside of theirs."""
    keepers = [joins(0, "n1"), joins(1, "n2")]

    def say(rank: int, stuck: bool) -> None:
        keepers[rank].send({"attempt": attempt.number, "rank": rank, "stuck": stuck})

    say(0, stuck=True)
    say(0, stuck=False)
    say(1, stuck=True)
    with pytest.raises(TimeoutError):
        heard(keepers[0])
    say(0, stuck=True)
    assert [heard(keeper) for keeper in keepers] == [{"hang": attempt.number}] * 2
