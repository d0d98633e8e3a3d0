"""How a round ended for one peer: a record of facts."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.collaborative.screening import Verdict


@dataclass(frozen=True)
class Round:
    """How a round ended for this peer."""

    group: int
    """Peers that averaged, itself included; 0 when it went on alone."""
    used: str
    """"average"; "own" (it went on alone); or "nothing": what it has learned, if anything, waits for the next round."""
    why: str
    """Why the average was not used; empty if it was."""
    samples_per_sec: float
    """Of the whole group."""
    drifted: bool
    """This peer's weights are no longer those of the group."""
    seconds: float = 0.0
    """How long the exchange took, from the end of the round."""
    parts: int = 0
    """Contributions to the parts of the average that have arrived here, of ``expected``."""
    expected: int = 0
    """Contributions that the peers of the group had announced."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Of the parts alone, see `exchange.Outcome`."""
    late: tuple[str, ...] = ()
    """Ids of peers that this one, as a reducer, has left out of the rest of the round."""
    reducers: tuple[str, ...] = ()
    """Ids of the others that have averaged for this peer."""
    untrue: tuple[Verdict, ...] = ()
    """Of those whose averages were not used, see `appraisal`."""
    collapsed: str = ""
    """Why this peer's own training of the round was given up; empty if it was not."""
    advice: str = ""
    """What the person at this machine should know about its link; empty if nothing has changed."""
