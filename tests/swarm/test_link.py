"""How a vector is written, what of it a peer's link carries in a round, and what people are told of that."""

from __future__ import annotations

import pytest
import torch

from trainkit.config.schema import CollaborativeConfig
from trainkit.swarm.address import MEGABIT
from trainkit.swarm.link import (
    PART,
    Codec,
    Link,
    Outcome,
    creators_share,
    decode,
    encode,
    encoded_bytes,
    enough,
    fitted,
    load_for,
    num_parts,
    volunteers_share,
)  # fmt: skip

VALUES = 3_000_000
PARTS = num_parts(VALUES)


def found(megabits: float, seconds: float, arrived: int = PARTS, received: int = 2) -> Outcome:
    """An exchange in which the first ``arrived`` parts were counted, and came at that speed in so many seconds."""
    return Outcome(
        received=(received,) * PARTS,
        counted=tuple(number < arrived for number in range(PARTS)),
        timed_bytes=int(megabits * MEGABIT * seconds),
        timed_seconds=seconds,
    )


def link(limit: float | None = None) -> Link:
    return Link(VALUES, "fp16", 12.0, 3.0, limit)


EVERYTHING = [1.0] * PARTS


def test_a_peer_of_unknown_speed_sends_everything_as_the_run_does() -> None:
    assert link().sent(EVERYTHING) == tuple(EVERYTHING)
    assert link().load.codec == "fp16"


def test_a_peer_that_nobody_had_to_wait_for_is_told_nothing() -> None:
    one = link()
    assert one.learn(EVERYTHING, found(1000.0, 0.01)) == ""
    assert one.upload is None


def test_a_slow_peer_sends_less_and_is_told_so_once_in_plain_words() -> None:
    one = link()
    told = one.learn(EVERYTHING, found(2.0, 2.9, arrived=6))
    assert told == (
        "upload 2.0 Mbit/s: this peer sends 8 bit, and each weight only in one of 6 rounds; nothing it learns is lost"
    )
    assert sum(one.sent(EVERYTHING)) == 9
    assert one.learn(one.sent(EVERYTHING), found(2.0, 2.2)) == ""


def test_the_parts_take_turns() -> None:
    one = link(2 * MEGABIT)
    rows = []
    for _ in range(one.load.rounds):
        rows.append(one.sent(EVERYTHING))
        one.learn(rows[-1], found(0.0, 0.0))
    assert all(map(any, zip(*rows, strict=True)))
    assert {sum(row) for row in rows} == {one.load.parts}


def test_a_peer_whose_first_part_was_late_already_is_slow() -> None:
    one = link()
    assert "8 bit" in one.learn(EVERYTHING, found(0.0, 0.0, arrived=0))
    assert one.upload is not None


def test_when_no_average_came_it_was_not_this_peers_link() -> None:
    one = link()
    assert one.learn(EVERYTHING, found(0.0, 0.0, arrived=0, received=0)) == ""
    assert one.upload is None


def test_a_link_that_gets_better_sends_more_again() -> None:
    one = link()
    one.learn(EVERYTHING, found(2.0, 2.9, arrived=6))
    for _ in range(6):
        told = one.learn(one.sent(EVERYTHING), found(100.0, 0.1)) or ""
    assert (one.load.codec, one.load.rounds) == ("fp16", 1)
    assert told == ""


def test_a_limit_holds_from_the_first_round_and_whatever_is_measured() -> None:
    one = link(2 * MEGABIT)
    assert one.load.rounds == 6
    one.learn(EVERYTHING, found(100.0, 0.1))
    assert one.upload == 2 * MEGABIT


def test_what_was_measured_before_the_first_round_counts_in_it() -> None:
    slow = Link(VALUES, "fp16", 12.0, 3.0, measured=2 * MEGABIT)
    assert (slow.load.codec, slow.load.rounds) == ("8bit", 6)
    assert slow.learn(slow.sent(EVERYTHING), found(2.0, 2.2)) == ""  # it has been told so already


def test_a_link_measured_too_slow_by_mistake_is_found_out() -> None:
    one = Link(VALUES, "fp16", 12.0, 3.0, measured=2 * MEGABIT)
    for _ in range(20):
        one.learn(one.sent(EVERYTHING), found(0.0, 0.0, arrived=PARTS))
    assert (one.load.codec, one.load.rounds) == ("fp16", 1)


def test_enough_is_what_sends_everything_in_every_round() -> None:
    needed = enough(VALUES, "fp16", 12.0)
    assert load_for(needed, VALUES, "fp16", 12.0).rounds == 1
    assert load_for(0.99 * needed, VALUES, "fp16", 12.0).codec == "8bit"


LARGE = 25_000_000


def settings(**given: object) -> CollaborativeConfig:
    return CollaborativeConfig.model_validate({"round_seconds": 60.0, **given})


@pytest.mark.parametrize(
    ("megabits", "codec", "seconds"),
    [(100.0, "fp16", 60.0), (20.0, "8bit", 60.0), (5.0, "8bit", 202.0)],
)
def test_a_creator_takes_8_bit_first_and_then_longer_rounds(megabits: float, codec: str, seconds: float) -> None:
    found = fitted(settings(), LARGE, megabits * MEGABIT)
    assert (found.compression, found.round_seconds) == (codec, seconds)


def test_what_fits_anyway_stays_as_it_is() -> None:
    assert fitted(settings(compression="none"), 1000, MEGABIT) == settings(compression="none")


def test_a_creator_is_told_what_each_volunteer_costs_it_in_a_round() -> None:
    config = fitted(settings(), LARGE, 20 * MEGABIT)
    assert creators_share(config, LARGE, 20 * MEGABIT) == (
        "At 20 Mbit/s: 8 bit, rounds of 60 s. For each volunteer this machine sends 25.2 MB a round, 10.1 s, "
        "17 % of it; 5 at most, or others must reduce as well."
    )


def test_a_volunteer_is_told_the_same_of_its_own_part() -> None:
    assert volunteers_share(settings(), LARGE, 5 * MEGABIT) == (
        "upload 5.0 Mbit/s: this peer sends 8 bit, and each weight only in one of 4 rounds; nothing it learns is lost; "
        "7.5 MB a round, 11.9 s, 20 % of it."
    )


def layers() -> torch.Tensor:
    """Two layers, one a thousand times smaller, and a rest that fills no block."""
    torch.manual_seed(0)
    return torch.cat([torch.randn(4096), torch.randn(4096) / 1000, torch.randn(7)])


@pytest.mark.parametrize(("codec", "error"), [("none", 0.0), ("fp16", 3e-4), ("8bit", 0.01)])
def test_a_codec_keeps_every_layer_in_the_bytes_it_promises(codec: Codec, error: float) -> None:
    data = encode(layers(), codec)
    assert len(data) == encoded_bytes(8199, codec)
    found = decode(data, codec, 8199)
    for part in (slice(0, 4096), slice(4096, 8192), slice(8192, None)):
        assert float((found[part] - layers()[part]).norm() / layers()[part].norm()) <= error


def test_8_bit_keep_a_block_of_zeros() -> None:
    assert torch.equal(decode(encode(torch.zeros(600), "8bit"), "8bit", 600), torch.zeros(600))


@pytest.mark.parametrize("codec", ["none", "fp16", "8bit"])
def test_what_holds_another_number_of_values_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match="bytes instead of"):
        decode(encode(torch.ones(600), codec), codec, 599)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown codec"):
        decode(bytes(16), "pickle", 4)


@pytest.mark.parametrize(
    ("megabits", "codec", "rounds"),
    [
        (None, "fp16", 1),
        (100.0, "fp16", 1),  # 6 MB in 0.5 s
        (15.0, "8bit", 1),  # in 2.4 s at most
        (2.0, "8bit", 6),
        (0.01, "8bit", 46),
    ],
)
def test_a_slow_link_first_sends_8_bit_and_then_takes_turns(megabits: float | None, codec: str, rounds: int) -> None:
    load = load_for(None if megabits is None else megabits * MEGABIT, VALUES, "fp16", 12.0)
    assert (load.codec, load.rounds) == (codec, rounds)


def test_a_fast_link_sends_what_the_run_does() -> None:
    assert load_for(None, 10 * PART, "none", 60.0).codec == "none"
    assert load_for(None, 10 * PART, "8bit", 60.0).codec == "8bit"
