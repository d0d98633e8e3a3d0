from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from trainkit.config.schema import CollaborativeConfig
from trainkit.errors import UserError
from trainkit.swarm.exchange import decode, encode
from trainkit.swarm.link import (
    MEGABIT,
    PART,
    Codec,
    Link,
    creators_share,
    encoded_bytes,
    enough,
    fitted,
    load_for,
    num_parts,
    rate_of,
    shortest_round,
    volunteers_share,
)

VALUES_LINK = 3_000_000
PARTS = num_parts(VALUES_LINK)


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
    return Link(VALUES_LINK, "fp16", 12.0, 3.0, limit)


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
    assert shortest_round(20 * MEGABIT, VALUES_LINK, codec) == pytest.approx(seconds, abs=0.01)  # type: ignore[arg-type]


def test_what_was_measured_before_the_first_round_counts_in_it() -> None:
    slow = Link(VALUES_LINK, "fp16", 12.0, 3.0, measured=2 * MEGABIT)
    assert (slow.load.codec, slow.load.rounds) == ("8bit", 6)
    assert slow.learn(slow.sent(EVERYTHING), Found(2.0, 2.2)) == ""  # it has been told so already


def test_a_link_that_was_measured_too_slow_by_mistake_is_found_out_when_nobody_waits_for_it() -> None:
    one = Link(VALUES_LINK, "fp16", 12.0, 3.0, measured=2 * MEGABIT)
    for _ in range(20):
        one.learn(one.sent(EVERYTHING), Found(0.0, 0.0, arrived=PARTS))
    assert (one.load.codec, one.load.rounds) == ("fp16", 1)


def test_enough_is_what_sends_everything_in_every_round() -> None:
    needed = enough(VALUES_LINK, "fp16", 12.0)
    assert load_for(needed, VALUES_LINK, "fp16", 12.0).rounds == 1
    assert load_for(0.99 * needed, VALUES_LINK, "fp16", 12.0).codec == "8bit"


VALUES_FITTING = 25_000_000


def settings(**given: object) -> CollaborativeConfig:
    return CollaborativeConfig.model_validate({"round_seconds": 60.0, **given})


@pytest.mark.parametrize(
    ("text", "megabits"), [("20Mbit", 20.0), ("500kbit", 0.5), ("1Gbit/s", 1000.0), ("2.5 mbit", 2.5)]
)
def test_a_speed_is_written_as_on_the_contract(text: str, megabits: float) -> None:
    assert rate_of(text) == pytest.approx(megabits * MEGABIT)


@pytest.mark.parametrize("text", ["20", "20MB", "fast", "0Mbit", "-1Mbit", "9" * 400 + "Mbit"])
def test_what_is_no_speed_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="is no speed of a link") as found:
        rate_of(text)
    assert "20Mbit" in found.value.fix


@pytest.mark.parametrize(
    ("megabits", "codec", "seconds"),
    [(100.0, "fp16", 60.0), (20.0, "8bit", 60.0), (5.0, "8bit", 202.0)],
)
def test_a_creator_takes_8_bit_first_and_then_longer_rounds(megabits: float, codec: str, seconds: float) -> None:
    found = fitted(settings(), VALUES_FITTING, megabits * MEGABIT)
    assert (found.compression, found.round_seconds) == (codec, seconds)


def test_what_fits_anyway_stays_as_it_is() -> None:
    assert fitted(settings(compression="none"), 1000, MEGABIT) == settings(compression="none")


def test_a_creator_is_told_bytes_seconds_and_share_of_a_round_and_how_many_volunteers_that_is_for() -> None:
    config = fitted(settings(), VALUES_FITTING, 20 * MEGABIT)
    assert creators_share(config, VALUES_FITTING, 20 * MEGABIT) == (
        "At 20 Mbit/s: 8 bit, rounds of 60 s. For each volunteer this machine sends 25.2 MB a round, 10.1 s, "
        "17 % of it; 5 at most, or others must reduce as well."
    )


def test_a_volunteer_is_told_the_same_of_its_own_part() -> None:
    assert volunteers_share(settings(), VALUES_FITTING, 5 * MEGABIT) == (
        "upload 5.0 Mbit/s: this peer sends 8 bit, and each weight only in one of 4 rounds; nothing it learns is lost; "
        "7.5 MB a round, 11.9 s, 20 % of it."
    )


_MEGABIT = 125_000.0


def layers() -> torch.Tensor:
    """Two layers, one a thousand times smaller, and a rest that fills no block."""
    torch.manual_seed(0)
    return torch.cat([torch.randn(4096), torch.randn(4096) / 1000, torch.randn(7)])


@pytest.mark.parametrize(("codec", "error"), [("none", 0.0), ("fp16", 3e-4), ("8bit", 0.01)])
def test_a_codec_gives_back_every_layer_to_within_its_error_in_the_bytes_it_promises(
    codec: Codec, error: float
) -> None:
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
    load = load_for(None if megabits is None else megabits * _MEGABIT, 3_000_000, "fp16", 12.0)
    assert (load.codec, load.rounds) == (codec, rounds)


def test_every_part_has_its_turn() -> None:
    load = load_for(2 * _MEGABIT, 3_000_000, "fp16", 12.0)
    sent = [load.chosen(turn) for turn in range(load.rounds)]
    assert all(any(column) for column in zip(*sent, strict=True))
    assert all(sum(row) == load.parts for row in sent)


def test_a_run_without_compression_does_not_become_finer_or_coarser_than_needed() -> None:
    assert load_for(None, 10 * PART, "none", 60.0).codec == "none"
    assert load_for(None, 10 * PART, "8bit", 60.0).codec == "8bit"
