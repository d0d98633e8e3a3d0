"""How a vector is written, what of it a peer's link carries in a round, and what people are told of that."""

import pytest
import torch

from trainkit.config.schema import CollaborativeConfig, ImpossibleError
from trainkit.swarm import average, sync
from trainkit.swarm.address import MEGABIT
from trainkit.swarm.average import Link
from trainkit.swarm.sync import Codec, Outcome

VALUES = 3_000_000
PARTS = sync.num_parts(VALUES)
EVERYTHING = (1.0,) * PARTS
LARGE = 25_000_000
SLOW = "upload 2.0 Mbit/s: this peer sends 4 bit, and each weight only in one of 3 rounds; nothing it learns is lost"


def found(megabits: float, seconds: float, arrived: int = PARTS, received: int = 2) -> Outcome:
    """An exchange in which the first ``arrived`` parts were counted, and came at that speed in so many seconds."""
    return Outcome(
        received=(received,) * PARTS,
        counted=tuple(number < arrived for number in range(PARTS)),
        timed_bytes=int(megabits * MEGABIT * seconds),
        timed_seconds=seconds,
    )


def settings(**given: object) -> CollaborativeConfig:
    return CollaborativeConfig.model_validate({"round_seconds": 60.0, **given})


RUN = settings(round_seconds=12.0, compression="fp16")


def opened(**known: float) -> Link:
    return Link(VALUES, RUN, **known)


@pytest.mark.parametrize("outcome", [found(1000.0, 0.01), found(0.0, 0.0, arrived=0, received=0)])
def test_who_was_not_waited_for_or_got_no_average_learns_nothing_of_its_link(outcome: Outcome) -> None:
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


def test_the_parts_take_turns() -> None:
    one = opened(limit=2 * MEGABIT)
    rows = []
    for _ in range(one.load.rounds):
        rows.append(one.sent(EVERYTHING))
        one.learn(rows[-1], found(0.0, 0.0))
    assert all(map(any, zip(*rows, strict=True)))
    assert {sum(row) for row in rows} == {one.load.parts}


@pytest.mark.parametrize("seconds", [0.1, 0.0], ids=["in time", "before anybody waited"])
def test_a_link_that_gets_better_or_was_measured_wrongly_sends_more_again(seconds: float) -> None:
    one = opened(measured=2 * MEGABIT)
    for _ in range(20):
        told = one.learn(one.sent(EVERYTHING), found(100.0, seconds))
    assert (one.load.codec, one.load.rounds, told) == ("fp16", 1, "")


def test_what_was_known_at_the_start_is_not_told_again_and_a_limit_holds() -> None:
    slow, limited = opened(measured=2 * MEGABIT), opened(limit=2 * MEGABIT)
    assert (slow.load.codec, slow.load.rounds) == (limited.load.codec, limited.load.rounds) == ("4bit", 3)
    assert slow.learn(slow.sent(EVERYTHING), found(2.0, 2.2)) == ""
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
    load = average.load_for(upload, VALUES, RUN.model_copy(update={"compression": run}))
    assert (load.codec, load.rounds) == (codec, rounds)
    assert average.enough(VALUES, RUN) == pytest.approx(20.0 * MEGABIT)


def test_gradients_are_never_sent_in_4_bit() -> None:
    """What is rounded off would be lost: nothing of an update is kept for the next."""
    load = average.load_for(2 * MEGABIT, VALUES, RUN.model_copy(update={"sync": "gradients"}))
    assert (load.codec, load.rounds) == ("8bit", 6)
    with pytest.raises(ImpossibleError, match="compression=4bit does not go with"):
        settings(sync="gradients", compression="4bit")


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
    agreed = average.fitted(settings(compression=run), LARGE, megabits * MEGABIT)
    assert (agreed.compression, agreed.round_seconds) == (codec, seconds)


def test_a_creator_is_told_what_a_round_costs() -> None:
    agreed = average.fitted(settings(), LARGE, 20 * MEGABIT)
    assert average.creators_share(agreed, LARGE, 20 * MEGABIT) == (
        "At 20 Mbit/s: 8 bit, rounds of 60 s. Sending to a volunteer takes 10.1 s of each; 5 at most, or others must "
        "reduce as well."
    )


def layers() -> torch.Tensor:
    """Two layers, one a thousand times smaller, a block of zeros, and a rest that fills no block."""
    torch.manual_seed(0)
    return torch.cat([torch.randn(4096), torch.randn(4096) / 1000, torch.zeros(512), torch.randn(7)])


@pytest.mark.parametrize(("codec", "error"), [("none", 0.0), ("fp16", 3e-4), ("8bit", 0.01), ("4bit", 0.15)])
def test_a_codec_keeps_every_layer_in_the_bytes_it_promises(codec: Codec, error: float) -> None:
    data = sync.encode(layers(), codec)
    assert len(data) == sync.encoded_bytes(8711, codec)
    read = sync.decode(data, codec, 8711)
    for part in (slice(0, 4096), slice(4096, 8192), slice(8192, 8704), slice(8704, None)):
        assert float((read[part] - layers()[part]).norm()) <= error * float(layers()[part].norm())
    with pytest.raises(ValueError, match="bytes instead of"):
        sync.decode(data, codec, 8710)
    with pytest.raises(ValueError, match="unknown codec"):
        sync.decode(data, "pickle", 8711)
