"""What a peer's link carries in a round, and what people are told of that."""

import pytest

from trainkit.config.schema import CollaborativeConfig
from trainkit.swarm.peer.link import Link, creators_share, exchange_seconds, fitted, load_for
from trainkit.swarm.protocol import codecs
from trainkit.swarm.protocol.addresses import MEGABIT
from trainkit.swarm.protocol.codecs import PART, Codec
from trainkit.swarm.protocol.outer_step import ExchangeOutcome

pytestmark = pytest.mark.usefixtures("hivemind_here")

VALUES = 3_000_000
PARTS = codecs.num_parts(VALUES)
EVERYTHING = (1.0,) * PARTS
LARGE = 25_000_000
SLOW = "upload 2.0 Mbit/s: this peer sends 4 bit, and each weight only in one of 3 rounds; nothing it learns is lost"


def found(megabits: float, seconds: float, arrived: int = PARTS, received: int = 2) -> ExchangeOutcome:
    """An exchange in which the first ``arrived`` parts were counted, and came at that speed in so many seconds."""
    return ExchangeOutcome(
        received=(received,) * PARTS,
        counted=tuple(number < arrived for number in range(PARTS)),
        timed_bytes=int(megabits * MEGABIT * seconds),
        timed_seconds=seconds,
    )


def settings(**given: object) -> CollaborativeConfig:
    return CollaborativeConfig.model_validate({"round_seconds": 60.0, **given})


RUN = settings(round_seconds=12.0, compression="fp16")


def opened(limit: float | None = None) -> Link:
    return Link(VALUES, RUN, limit)


@pytest.mark.parametrize("outcome", [found(1000.0, 0.01), found(0.0, 0.0, arrived=0, received=0)])
def test_who_was_not_waited_for_or_got_no_average_learns_nothing_of_its_link(outcome: ExchangeOutcome) -> None:
    one = opened()
    assert one.sent(EVERYTHING) == EVERYTHING
    assert (one.learn(EVERYTHING, outcome), one.upload, one.load.codec) == ("", None, "fp16")


def test_a_slow_peer_sends_less_and_is_told_so_once_in_plain_words() -> None:
    one = opened()
    assert one.learn(EVERYTHING, found(2.0, 2.9, arrived=6)) == SLOW
    assert sum(one.sent(EVERYTHING)) == 18
    assert one.learn(one.sent(EVERYTHING), found(2.0, 2.2)) == ""
    late = opened()  # with its first part
    assert "4 bit" in late.learn(EVERYTHING, found(0.0, 0.0, arrived=0))
    assert late.upload is not None


def test_who_could_not_send_all_in_time_sends_less_until_it_can() -> None:
    """A link of 2 Mbit/s: what is under way when an exchange is over tells nobody how fast it comes."""
    one, most = opened(), 2 * MEGABIT * exchange_seconds(RUN)
    assert codecs.encoded_bytes(PART, one.load.codec) * one.load.parts > most
    assert one.learn(EVERYTHING, ExchangeOutcome(unfinished=True)) == "upload 5.4 Mbit/s: this peer sends 4 bit"
    assert (one.load.codec, one.load.rounds) == ("4bit", 1)
    assert codecs.encoded_bytes(PART, one.load.codec) * one.load.parts <= most
    assert one.learn(one.sent(EVERYTHING), found(2.0, 2.9, arrived=6)) != ""
    assert one.load.rounds > 1


def test_who_had_nothing_to_send_learns_nothing_of_its_link() -> None:
    one = opened()
    assert (one.learn((0.0,) * PARTS, ExchangeOutcome(unfinished=True)), one.upload) == ("", None)


def test_the_parts_take_turns() -> None:
    one = opened(limit=2 * MEGABIT)
    rows = []
    for _ in range(one.load.rounds):
        rows.append(one.sent(EVERYTHING))
        one.learn(rows[-1], found(0.0, 0.0))
    assert all(map(any, zip(*rows, strict=True)))
    assert {sum(row) for row in rows} == {one.load.parts}


@pytest.mark.parametrize("seconds", [0.1, 0.0], ids=["in time", "before anybody waited"])
def test_a_link_that_gets_better_sends_more_again(seconds: float) -> None:
    one = opened()
    assert one.learn(EVERYTHING, found(2.0, 2.9, arrived=6)) == SLOW
    for _ in range(20):
        told = one.learn(one.sent(EVERYTHING), found(100.0, seconds))
    assert (one.load.codec, one.load.rounds, told) == ("fp16", 1, "")


def test_a_limit_holds_and_is_not_told_again() -> None:
    limited = opened(limit=2 * MEGABIT)
    assert (limited.load.codec, limited.load.rounds) == ("4bit", 3)
    assert limited.learn(limited.sent(EVERYTHING), found(2.0, 2.2)) == ""
    limited.learn(EVERYTHING, found(100.0, 0.1))
    assert limited.upload == 2 * MEGABIT


@pytest.mark.parametrize(
    ("megabits", "run", "codec", "rounds"),
    [
        (None, "none", "none", 1),
        (100.0, "fp16", "fp16", 1),  # 6 MB in 0.5 s
        (20.01, "fp16", "fp16", 1),
        (19.99, "fp16", "8bit", 1),
        (9.9, "fp16", "4bit", 1),
        (2.0, "fp16", "4bit", 3),
        (0.01, "8bit", "4bit", 46),
    ],
)
def test_a_slow_link_first_sends_coarser_numbers_and_then_takes_turns(
    megabits: float | None, run: Codec, codec: str, rounds: int
) -> None:
    upload = None if megabits is None else megabits * MEGABIT
    load = load_for(upload, VALUES, RUN.model_copy(update={"compression": run}))
    assert (load.codec, load.rounds) == (codec, rounds)


@pytest.mark.parametrize(
    ("run", "megabits", "codec", "seconds"),
    [
        ("fp16", 100.0, "fp16", 60.0),
        ("fp16", 20.0, "8bit", 60.0),
        ("fp16", 5.0, "8bit", 202.0),
        ("4bit", 20.0, "4bit", 60.0),
        ("4bit", 5.0, "4bit", 202.0),  # averages go back in 8
    ],
)
def test_a_creator_takes_8_bit_first_and_then_longer_rounds(
    run: Codec, megabits: float, codec: str, seconds: float
) -> None:
    agreed = fitted(settings(compression=run), LARGE, megabits * MEGABIT)
    assert (agreed.compression, agreed.round_seconds) == (codec, seconds)


def test_a_creator_is_told_what_a_round_costs() -> None:
    agreed = fitted(settings(), LARGE, 20 * MEGABIT)
    assert creators_share(agreed, LARGE, 20 * MEGABIT) == (
        "At 20 Mbit/s: 8 bit, rounds of 60 s. Sending to a volunteer takes 10.1 s of each; 5 at most, or others must "
        "reduce as well."
    )
