"""Ways into a run: a token or an address; as an argument, in a file, from standard input, from the environment."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest

from jobs import submit, swarm, train
from trainkit.errors import UserError
from trainkit.swarm.admission import Owner, entry_of, invited
from trainkit.swarm.invitations import GUESTS, Key, grant, write_token

ADDRESS = "/ip4/203.0.113.7/tcp/4711/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
TOKEN = write_token(grant(Key(b"o" * 32), "run", "anna", "volunteer", time.time() + 86400), [ADDRESS])


@pytest.mark.parametrize("word", [TOKEN, ADDRESS], ids=["token", "address"])
@pytest.mark.parametrize("way", ["argument", "file", "input", "environment"])
def test_a_token_or_an_address_is_taken_from_wherever_it_is(
    way: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token.txt").write_text(f"{word}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{word}\n"))
    words = {"argument": [word], "file": [str(tmp_path / "token.txt")], "input": ["-"], "environment": []}[way]
    env = {"TRAINKIT_TOKEN": f"{word}\n"} if way == "environment" else {}
    entry = entry_of(words, env, name="anna")
    assert (entry.addresses, entry.invited, entry.own.grant.name) == ((ADDRESS,), word == TOKEN, "anna")
    assert entry.seen == (way == "argument" and word == TOKEN)  # of an address there is nothing to hide


@pytest.mark.parametrize("way", ["argument", "file", "input", "environment"])
@pytest.mark.parametrize("verb", ["submit", "train", "doctor", "status"])
def test_a_token_that_others_see_is_warned_of_by_every_command(
    verb: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens at the address: the warning comes before that is known."""
    monkeypatch.setattr("trainkit.swarm.reader.run_at", _nobody)
    monkeypatch.setattr("trainkit.swarm.doctor.examine", _nobody)
    monkeypatch.setattr("trainkit.swarm.reader.open_reader", _nobody)
    (tmp_path / "token.txt").write_text(f"{TOKEN}\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TOKEN}\n"))
    words = {"argument": [TOKEN], "file": [str(tmp_path / "token.txt")], "input": ["-"], "environment": []}[way]
    monkeypatch.setenv("TRAINKIT_TOKEN", TOKEN if way == "environment" else "")
    given = {
        "submit": (submit.main, ["hivemind", "--join", *words, "--dry-run"]),
        "train": (train.main, ["hivemind", "--join", *words]),
        "doctor": (swarm.main, ["doctor", *words]),
        "status": (swarm.main, ["status", *words]),
    }
    main, arguments = given[verb]
    with pytest.raises(UserError, match="nobody is there"):
        main(arguments, dict(os.environ))
    assert ("list of processes" in capsys.readouterr().err) == (way == "argument")


def _nobody(*_: object) -> None:
    raise UserError("nobody is there", why="it is a test", fix="none")


def test_what_is_none_is_not_repeated_for_it_may_be_a_secret() -> None:
    with pytest.raises(UserError) as refused:
        entry_of([], {"TRAINKIT_TOKEN": TOKEN[:-3]}, name="anna")
    assert TOKEN[20:40] not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "{} is empty."),
        ("\n", "{} is empty."),
        ("my secret thing", "{} holds neither a token nor an address."),
    ],
)
@pytest.mark.parametrize("way", ["file", "input", "environment"])
def test_what_holds_no_token_is_named_without_what_it_holds(
    way: str, text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token.txt"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    source = {"file": str(file), "input": "Standard input", "environment": "TRAINKIT_TOKEN"}[way]
    with pytest.raises(UserError) as refused:
        entry_of({"file": [source], "input": ["-"], "environment": []}[way], {"TRAINKIT_TOKEN": text}, name="anna")
    missing = way == "environment" and not text.strip()
    assert refused.value.what == ("TOKEN missing." if missing else says.format(source))
    assert "secret" not in str(refused.value)


def test_who_was_invited_by_name_is_called_so_and_guests_are_many() -> None:
    guest = write_token(grant(Key(b"o" * 32), "run", GUESTS, "volunteer", time.time() + 86400), [ADDRESS])
    assert [entry_of([word], {}, name="").name for word in (TOKEN, guest, ADDRESS)] == ["anna", "", ""]


def test_a_token_without_its_beginning_is_not_repeated_whole() -> None:
    with pytest.raises(UserError, match="is neither a token") as refused:
        entry_of([TOKEN[3:]], {}, name="anna")
    assert TOKEN[60:80] not in str(refused.value)


def test_the_line_that_is_printed_with_a_token_shows_it_to_nobody_else_on_the_machine(tmp_path: Path) -> None:
    _, line = invited(Owner(tmp_path, Key(b"o" * 32)), (ADDRESS,), "anna", 600.0, "volunteer")
    variable, *command = line.split()
    assert command == ["python", "-m", "jobs.join"]
    name, _, token = variable.partition("=")
    assert entry_of([], {name: token}, name="x").own.grant.name == "anna"
    assert token not in "".join(file.read_text(encoding="utf-8") for file in tmp_path.iterdir())
