"""A run that goes on in two places: two creators with one key, from copies of one run folder, lead two swarms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from trainkit import terminal
from trainkit.collaborative import address, dialback
from trainkit.collaborative.dht import SwarmDHT
from trainkit.collaborative.messages import Progress
from trainkit.errors import UserError

_DIAL_SECONDS = 30.0


def elsewhere(addresses: Sequence[str], own: Sequence[str]) -> list[str]:
    """Those at which this peer would be another process: its own id, and not its own place."""
    here = {item.rpartition("/p2p/")[0] for item in own}
    me = address.peer_of(own[0]) if own else ""
    return [item for item in addresses if address.peer_of(item) == me and item.rpartition("/p2p/")[0] not in here]


def require_alone(dht: SwarmDHT, known: Sequence[str]) -> None:
    """Refuse to go on with a run whose creator answers at another place.

    Args:
        known: where it has been before.

    Raises UserError.
    """
    told = dht.progress().get(dht.peer_id)
    places = elsewhere([*known, *(told.addresses if told is not None else ())], dht.addresses())
    if not places:
        return
    there: list[str] = dht.in_dht(partial(dialback.reached, at=tuple(dict.fromkeys(places))), _DIAL_SECONDS, [])
    if there:
        raise UserError(
            "This run goes on already, on another machine.",
            why=f"Its creator, with the key of this run folder, answers at {there[0]}: one of the folders is a copy.",
            fix="End that one with Ctrl-C, and copy its run folder here: it has the newer checkpoints.",
        )


@dataclass
class Twin:
    """Looks for one that has come later, while training."""

    own: Sequence[str]
    """This peer's addresses."""
    since: float
    """Of what was told before, this peer may have been another process itself."""
    say: Callable[[str], None]
    _said: set[str] = field(default_factory=set)

    def look(self, told: Progress | None) -> None:
        """``told``: what the swarm knows of this peer."""
        if told is None or told.time <= self.since:
            return
        for item in elsewhere(told.addresses, self.own)[:1]:
            if item not in self._said:
                self._said.add(item)
                self.say(
                    f"  another machine goes on with this run and its key, at {terminal.one_line(item)}: "
                    "two swarms come of it. End one of the two with Ctrl-C"
                )
