"""Peers that cheat, in swarms of real peers: what the honest ones end with, and what is said of the others."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.collaborative.conftest import Command, Commands, started_in

pytestmark = [pytest.mark.swarm, pytest.mark.long]

HARDER = ("data.name=tests.collaborative.noisy:data", "collaborative.round_seconds=4")
# Long enough that peers that start slowly have most of it in common.
ROUNDS = 24


@dataclass(frozen=True)
class Swarm:
    """What a swarm of honest peers, and perhaps an attacker, came to."""

    creator: Command
    honest: list[Command]
    attackers: list[Command]
    run: Path
    status: str

    @property
    def loss(self) -> float:
        """Of the creator's last validation."""
        done = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
        return float(done["val"]["loss"])

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == kind]


def swarm(commands: Commands, *attacks: str, honest: int, to_the_end: bool = True) -> Swarm:
    """A creator and ``honest`` more, with an attacker for each of ``attacks``; all of them end with the creator."""
    creator, token = commands.create(*HARDER, f"collaborative.rounds={ROUNDS if to_the_end else 500}")

    def join(name: str, token: str) -> tuple[str, ...]:
        # Each in a folder of its own, for those that start at once would take the same one.
        return ("join", token, "--allow-code", "--name", name, "--run-dir", str(commands.run(name)))

    peers = [commands.start(*join(f"honest-{index}", token)) for index in range(honest)]
    # With an invitation of its own: a ban is of all who use one.
    cheats = [commands.attack(attack, *join("mallory", commands.invite("mallory"))) for attack in attacks]
    # Whose records are lies has no name here; whoever sends no part is in no group.
    creator.says("mallory" if attacks == ("gather",) else f"{1 + honest + len(attacks)} peers averaged")
    status = commands.start("swarm", "status", token)
    assert status.ends() == 0, status.output
    if not to_the_end:
        creator.says("mallory is banned")
        creator.says("peers averaged.*\n(.*\n)*.*peers averaged")
        creator.process.send_signal(signal.SIGINT)
    assert creator.ends(240) == 0, creator.output
    for peer in peers:  # who is banned is not told of the end; `started_in` ends it
        peer.ends(60)
    assert [peer.process.returncode for peer in peers] == [0] * honest, [peer.output for peer in peers]
    return Swarm(creator, peers, cheats, commands.run("hivemind-0001"), status.output)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """An honest peer, and one that sends its pseudo-gradient fifty times as long and turned round, until it is out."""
    with started_in(tmp_path_factory.mktemp("attack")) as commands:
        yield swarm(commands, "times-50", honest=1, to_the_end=False)


def test_an_attacker_does_not_spoil_the_model(story: Swarm) -> None:
    losses = [float(text) for text in re.findall(r"val loss (\S+)", story.creator.output)]
    assert losses[-1] < losses[0] < 2.4
    assert max(losses) < 2.4  # who knows nothing has 2.3


def test_who_was_left_out_and_why_is_an_event_and_a_line(story: Swarm) -> None:
    dropped, (banned,) = story.events("peer_dropped"), story.events("peer_banned")
    assert {event["peer"] for event in dropped} == {banned["peer"]}
    assert all(re.match(r"was .* times longer|points against", event["why"]) for event in dropped)
    assert re.search(r"^  mallory was left out of round \d+: ", story.creator.output, re.MULTILINE)


def test_three_times_in_a_row_is_a_ban(story: Swarm) -> None:
    (banned,) = story.events("peer_banned")
    assert banned["name"] == "mallory"
    assert [event["round"] for event in story.events("peer_dropped")][2] == banned["round"]
    assert "To lift it: python -m jobs.swarm unban mallory" in story.creator.output
    assert "mallory" in (story.run / "bans.jsonl").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of three honest peers among themselves."""
    with started_in(tmp_path_factory.mktemp("honest")) as commands:
        return swarm(commands, honest=2).loss


@pytest.mark.long
@pytest.mark.parametrize(
    "attack", ["times-9", "times-50", "times1000", "nan", "weight", "gather", "name", "loss", "speed"]
)
def test_with_an_attacker_the_honest_peers_loss_is_within_10_percent_of_that_without(
    attack: str, undisturbed: float, commands: Commands
) -> None:
    found = swarm(commands, attack, honest=3 if attack == "weight" else 2)
    print(f"{attack}: loss {found.loss:.4f}, without the attacker {undisturbed:.4f}")
    assert found.loss <= 1.1 * undisturbed
    if attack in ("times-9", "times-50", "times1000", "nan", "weight", "gather"):
        assert {event["peer"][-6:] for event in found.events("peer_dropped")}
    for text in (found.status, found.creator.output):
        assert text.replace("\n", "").isprintable()
