from __future__ import annotations

from dataclasses import dataclass

import pytest

from trainkit.swarm.link import MEGABIT, Link, enough, load_for, num_parts, shortest_round

VALUES = 3_000_000
PARTS = num_parts(VALUES)


@dataclass
class Found:
    """An exchange's outcome: the first ``counted`` parts, of ``expected``, arrived within ``seconds``."""

    megabits: float
    seconds: float
    arrived: int = PARTS

    @property
    def received(self) -> list[int]:
        return [2] * PARTS

    @property
    def counted(self) -> list[bool]:
        return [number < self.arrived for number in range(PARTS)]

    @property
    def timed_bytes(self) -> int:
        return int(self.megabits * MEGABIT * self.seconds)

    @property
    def timed_seconds(self) -> float:
        return self.seconds


def link(limit: float | None = None) -> Link:
    return Link(VALUES, "fp16", 12.0, 3.0, limit)


EVERYTHING = [1.0] * PARTS


def test_a_peer_of_unknown_speed_sends_everything_as_the_run_does() -> None:
    assert link().sent(EVERYTHING) == tuple(EVERYTHING)
    assert link().load.codec == "fp16"


def test_a_peer_that_nobody_had_to_wait_for_goes_on_as_before_and_is_told_nothing() -> None:
    one = link()
    assert one.learn(EVERYTHING, Found(1000.0, 0.01)) == ""
    assert one.upload is None


def test_a_slow_peer_sends_less_from_the_next_round_on_and_is_told_so_once_in_plain_words() -> None:
    one = link()
    told = one.learn(EVERYTHING, Found(2.0, 2.9, arrived=6))
    assert told == (
        "upload 2.0 Mbit/s: this peer sends 8 bit, and each weight only in one of 6 rounds; nothing it learns is lost"
    )
    assert sum(one.sent(EVERYTHING)) == 9
    assert one.learn(one.sent(EVERYTHING), Found(2.0, 2.2)) == ""


def test_the_parts_take_turns() -> None:
    one = link(2 * MEGABIT)
    rows = []
    for _ in range(one.load.rounds):
        rows.append(one.sent(EVERYTHING))
        one.learn(rows[-1], Found(0.0, 0.0))
    assert all(map(any, zip(*rows, strict=True)))


def test_a_peer_whose_first_part_was_late_already_is_slow_even_if_nothing_could_be_measured() -> None:
    one = link()
    assert "8 bit" in one.learn(EVERYTHING, Found(0.0, 0.0, arrived=0))
    assert one.upload is not None


def test_when_no_average_came_it_was_not_this_peers_link() -> None:
    class Gone(Found):
        @property
        def received(self) -> list[int]:
            return [0] * PARTS

    one = link()
    assert one.learn(EVERYTHING, Gone(0.0, 0.0, arrived=0)) == ""
    assert one.upload is None


def test_a_link_that_gets_better_sends_more_again() -> None:
    one = link()
    one.learn(EVERYTHING, Found(2.0, 2.9, arrived=6))
    for _ in range(6):
        told = one.learn(one.sent(EVERYTHING), Found(100.0, 0.1)) or ""
    assert (one.load.codec, one.load.rounds) == ("fp16", 1)
    assert told == ""


def test_a_limit_holds_from_the_first_round_and_whatever_is_measured() -> None:
    one = link(2 * MEGABIT)
    assert one.load.rounds == 6
    one.learn(EVERYTHING, Found(100.0, 0.1))
    assert one.upload == 2 * MEGABIT


@pytest.mark.parametrize(("codec", "seconds"), [("fp16", 12.0), ("8bit", 6.05)])
def test_a_round_is_long_enough_when_all_of_the_vector_arrives_in_its_share_of_it(codec: str, seconds: float) -> None:
    assert shortest_round(20 * MEGABIT, VALUES, codec) == pytest.approx(seconds, abs=0.01)  # type: ignore[arg-type]


def test_what_was_measured_before_the_first_round_counts_in_it() -> None:
    slow = Link(VALUES, "fp16", 12.0, 3.0, measured=2 * MEGABIT)
    assert (slow.load.codec, slow.load.rounds) == ("8bit", 6)
    assert slow.learn(slow.sent(EVERYTHING), Found(2.0, 2.2)) == ""  # it has been told so already


def test_a_link_that_was_measured_too_slow_by_mistake_is_found_out_when_nobody_waits_for_it() -> None:
    one = Link(VALUES, "fp16", 12.0, 3.0, measured=2 * MEGABIT)
    for _ in range(20):
        one.learn(one.sent(EVERYTHING), Found(0.0, 0.0, arrived=PARTS))
    assert (one.load.codec, one.load.rounds) == ("fp16", 1)


def test_enough_is_what_sends_everything_in_every_round() -> None:
    needed = enough(VALUES, "fp16", 12.0)
    assert load_for(needed, VALUES, "fp16", 12.0).rounds == 1
    assert load_for(0.99 * needed, VALUES, "fp16", 12.0).codec == "8bit"
