"""Swarms of real peers on this machine with somebody among them who cheats, and what they come to."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.swarm.conftest import Command, Commands
from trainkit.common import fileio, jsonl

HARDER = ("data.name=tests.swarm.noisy:data", "collaborative.round_seconds=4")

# Long enough that peers that start slowly have most of it in common.
SETTINGS = (*HARDER, "collaborative.rounds=24")


@dataclass(frozen=True)
class Swarm:
    """What a swarm of honest peers, and perhaps an attacker, came to."""

    creator: Command
    honest: list[Command]
    attackers: list[Command]
    run: Path
    status: str
    met: int
    """The round in which all were there."""

    @property
    def loss(self) -> float:
        """Of the creator's last validation."""
        return float(fileio.read_object(self.run / "summary.json")["val"]["loss"])

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in jsonl.read_jsonl(self.run / "events.jsonl") if event["event"] in kinds]

    def names(self, *kinds: str) -> list[str]:
        """Of the peers of those events, in their order."""
        return [event["name"] for event in self.events(*kinds)]

    def is_as_good_as(self, undisturbed: float) -> bool:
        """Whether the attack has cost at most 10 % of the loss."""
        print(f"loss {self.loss:.4f}, without the attacker {undisturbed:.4f}")
        return self.loss <= 1.1 * undisturbed


def swarm(
    commands: Commands,
    *attacks: str,
    honest: int,
    settings: Sequence[str] = SETTINGS,
    late: bool = False,
    until: str = "",
    rounds: int | None = None,
    seconds: float = 240,
) -> Swarm:
    """A creator and ``honest`` more, with an attacker for each of ``attacks``; all of them end with the creator.

    Args:
        late: one more honest peer joins when all are there, which is when the creator says ``until``.
        rounds: after which, from then on, the creator is stopped, if it is not to go on to its last one.
    """
    creator, token = commands.create(*settings)

    def join(name: str, token: str) -> tuple[str, ...]:
        # Each in a folder of its own, for those that start at once would take the same one.
        return ("join", token, "--allow-code", "--name", name, *commands.folder_of(name))

    # Whom the owner has trusted to average for others; with an invitation of her own, for a ban is of all who use it.
    reduces = any(attack.startswith("reduces") for attack in attacks)
    hers = commands.invite("mallory", *(("--reduce",) if reduces else ()))
    where = ("--public", "--host", "127.0.0.1") if reduces else ()
    peers = [commands.start(*join(f"honest-{index}", token)) for index in range(honest)]
    cheats = [
        commands.attack(attack, *join(f"mallory{number or ''}", hers), *where) for number, attack in enumerate(attacks)
    ]
    # Whose records are lies has no name here; whoever sends no part is in no group.
    averages = not {"impostor", "stall"}.intersection(attacks)
    creator.says(until or (f"{1 + honest + len(cheats)} peers averaged" if averages else "mallory"), 120)
    met = max(map(int, re.findall(r"^round +(\d+)/", creator.output, re.MULTILINE)), default=0)
    status = commands.start("swarm", "status", token)
    assert status.ends() == 0, status.output
    if late:
        peers.append(commands.start(*join("late", token)))
    if rounds is not None:
        creator.says(rf"^round +{met + rounds}/", seconds)
        creator.process.send_signal(signal.SIGINT)
    assert creator.ends(seconds) == 0, creator.output
    for peer in peers:
        peer.ends(60)
    assert [peer.process.returncode for peer in peers] == [0] * len(peers), [peer.output for peer in peers]
    return Swarm(creator, peers, cheats, commands.run("hivemind-0001"), status.output, met)
