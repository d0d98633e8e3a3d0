from __future__ import annotations

import pytest

from trainkit.errors import UserError
from trainkit.ranks.env import NO_SECRET, VARIABLE, ForgedError, Secret

OURS, THEIRS = Secret("correct horse battery staple"), Secret("another text of enough length")


def test_what_was_sealed_is_had_again_with_the_same_secret() -> None:
    assert OURS.unseal("joined/1", OURS.seal("joined/1", b"n1")) == b"n1"


@pytest.mark.parametrize(
    "sealed",
    [
        b"",
        b"n1",
        THEIRS.seal("joined/1", b"n1"),
        NO_SECRET.seal("joined/1", b"n1"),
        OURS.seal("joined/0", b"n1"),  # moved here from another place
        OURS.seal("joined/1", b"n1")[:-1],
        OURS.seal("joined/1", b"n1") + b"2",
    ],
    ids=["nothing", "plain", "another secret", "no secret", "another purpose", "cut", "longer"],
)
def test_anything_else_is_a_forgery(sealed: bytes) -> None:
    with pytest.raises(ForgedError):
        OURS.unseal("joined/1", sealed)


def test_names_say_nothing_to_who_does_not_know_the_secret() -> None:
    assert OURS.name("joined/1") == Secret(OURS.text).name("joined/1")
    assert len({OURS.name("joined/1"), OURS.name("joined/0"), THEIRS.name("joined/1"), NO_SECRET.name("joined/1")}) == 4
    assert "joined" not in OURS.name("joined/1")


def test_it_is_read_from_the_environment_and_may_be_absent() -> None:
    assert Secret.from_mapping({VARIABLE: f" {OURS.text}\n"}) == OURS
    assert not Secret.from_mapping({})
    assert not Secret.from_mapping({VARIABLE: ""})


def test_one_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(UserError, match="too short"):
        Secret.from_mapping({VARIABLE: "swordfish"})


def test_each_that_is_made_is_another_and_long_enough() -> None:
    first, second = Secret.generate(), Secret.generate()
    assert first != second
    assert len(first.text) >= 32


def test_it_does_not_show_itself() -> None:
    assert OURS.text not in repr(OURS)
