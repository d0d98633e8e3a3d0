from __future__ import annotations

import pytest

from trainkit.config.schema import CollaborativeConfig
from trainkit.errors import UserError
from trainkit.swarm.link import MEGABIT, creators_share, fitted, rate_of, volunteers_share

VALUES = 25_000_000


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
    found = fitted(settings(), VALUES, megabits * MEGABIT)
    assert (found.compression, found.round_seconds) == (codec, seconds)


def test_what_fits_anyway_stays_as_it_is() -> None:
    assert fitted(settings(compression="none"), 1000, MEGABIT) == settings(compression="none")


def test_a_creator_is_told_bytes_seconds_and_share_of_a_round_and_how_many_volunteers_that_is_for() -> None:
    config = fitted(settings(), VALUES, 20 * MEGABIT)
    assert creators_share(config, VALUES, 20 * MEGABIT) == (
        "At 20 Mbit/s: 8 bit, rounds of 60 s. For each volunteer this machine sends 25.2 MB a round, 10.1 s, "
        "17 % of it; 5 at most, or others must reduce as well."
    )


def test_a_volunteer_is_told_the_same_of_its_own_part() -> None:
    assert volunteers_share(settings(), VALUES, 5 * MEGABIT) == (
        "upload 5.0 Mbit/s: this peer sends 8 bit, and each weight only in one of 4 rounds; nothing it learns is lost; "
        "7.5 MB a round, 11.9 s, 20 % of it."
    )
