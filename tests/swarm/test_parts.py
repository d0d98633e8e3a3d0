from __future__ import annotations

import pytest
import torch

from trainkit.swarm.exchange import decode, encode
from trainkit.swarm.link import PART, Codec, encoded_bytes, load_for

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
