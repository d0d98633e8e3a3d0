"""``--max-upload``: what a link of a known speed means before anything is sent."""

from __future__ import annotations

import math
import re

from trainkit.collaborative.link import MEGABIT, in_words, shortest_round
from trainkit.collaborative.parts import coarser, encoded_bytes, load_for
from trainkit.config.schema import CollaborativeConfig
from trainkit.errors import UserError

_UNITS = {"k": 1e-3, "m": 1.0, "g": 1e3}


def rate_of(text: str) -> float:
    """Bytes per second of ``20Mbit``, ``500kbit`` or ``1Gbit/s``.

    Raises UserError.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?", text.strip(), re.IGNORECASE)
    rate = float(found[1]) * _UNITS[found[2].lower()] * MEGABIT if found else 0.0
    if not 0.0 < rate < math.inf:
        raise UserError(
            f"--max-upload {text} is no speed of a link.",
            why="It is given in bits per second, as on the contract with the provider.",
            fix="Write it as 20Mbit, 500kbit or 1Gbit.",
        )
    return rate


def fitted(config: CollaborativeConfig, values: int, upload: float) -> CollaborativeConfig:
    """The run's settings for a creator with that upload: 8 bit if need be, and rounds that are long enough.

    Args:
        values: in the vector that peers average.
        upload: bytes per second, of which one volunteer's averages may take their share of a round.
    """
    codec, seconds = config.compression, config.round_seconds
    if shortest_round(upload, values, codec) > seconds:
        codec = coarser(codec, "8bit")
        seconds = max(seconds, float(math.ceil(shortest_round(upload, values, codec))))
    return config.model_copy(update={"compression": codec, "round_seconds": seconds})


def creators_share(config: CollaborativeConfig, values: int, upload: float) -> str:
    """What to expect of a creator that averages for all, in a line."""
    size = encoded_bytes(values, config.compression)
    seconds = size / upload
    volunteers = int((config.round_seconds - config.matchmaking_seconds) / seconds)
    return (
        f"At {upload / MEGABIT:g} Mbit/s: {_codec(config.compression)}, rounds of {config.round_seconds:g} s. "
        f"For each volunteer this machine sends {size / 1e6:.1f} MB a round, {seconds:.1f} s, "
        f"{100 * seconds / config.round_seconds:.0f} % of it; {volunteers} at most, or others must reduce as well."
    )


def volunteers_share(config: CollaborativeConfig, values: int, upload: float) -> str:
    """What to expect of a volunteer, in a line."""
    load = load_for(upload, values, config.compression, config.round_seconds)
    size = encoded_bytes(values, load.codec) * load.parts / load.of
    return (
        f"{in_words(load, upload)}; {size / 1e6:.1f} MB a round, {size / upload:.1f} s, "
        f"{100 * size / upload / config.round_seconds:.0f} % of it."
    )


def _codec(codec: str) -> str:
    return "8 bit" if codec == "8bit" else "no compression" if codec == "none" else codec
