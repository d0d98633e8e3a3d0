"""What a reducer does about those whose contributions it had to drop: events, strikes, bans; once a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trainkit import terminal
from trainkit.collaborative.bans import FILE, STRIKES, Ban, Bans, Strikes
from trainkit.collaborative.invitation import GUESTS, RANKS, credited
from trainkit.collaborative.messages import Progress
from trainkit.collaborative.result import Round
from trainkit.collaborative.screening import Action, Verdict
from trainkit.records.attempts import Remark
from trainkit.records.contributions import Counted
from trainkit.records.rundir import RunDir

# Events and lines of one round; a flood of liars must not become a flood of records.
_MOST_EVENTS = 20
_EVENTS: Mapping[Action, Remark] = {
    "dropped": "peer_dropped",
    "left out": "peer_left_out",
    "clipped": "peer_clipped",
}


class Screening(Protocol):
    """The averager, as far as the sentry asks it (`guarding.GuardedAverager`)."""

    def expect(self, possible: Mapping[str, float]) -> None: ...
    def findings(self) -> Collection[Any]: ...


def nobody(banned: Collection[str]) -> None:
    """Enforces no ban."""


@dataclass
class Sentry:
    """Keeps watch over one reducer's rounds."""

    averager: Screening
    bans: Bans
    remark: Callable[..., None] = lambda kind, **facts: None
    """Writes an event."""
    say: Callable[[str], None] = lambda line: None
    enforce: Callable[[Collection[str]], None] = nobody
    """Shuts the door on exactly these ids (`Admission.ban`)."""
    invitation_of: Callable[[str], str] = str
    """Peer id -> what is banned with it: its invitation, or itself; empty for whom nobody bans."""
    credit: Callable[[Collection[Counted]], None] = lambda counted: None
    """Takes note of who has contributed to a round."""
    judges_reducers: bool = False
    """Also who has averaged wrongly is banned: it is the owner who has trusted them."""
    _strikes: Strikes = field(default_factory=Strikes)
    _as_reducers: Strikes = field(default_factory=Strikes)
    _enforced: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)
    _began: float = field(default_factory=time.time)
    _unnamed: dict[str, Counted] = field(default_factory=dict)

    def keeping(self, run_dir: RunDir, remark: Callable[..., None]) -> Sentry:
        """The same with a memory: bans in that run folder, and events."""
        self.bans.keep_in(run_dir.path / FILE)
        return replace(self, remark=remark)

    def before_round(self, peers: Mapping[str, Progress], round_seconds: float) -> None:
        """Tell the averager what peers can have trained on, by the speed that they have published; before its first
        round a peer has none to tell of."""
        known = {peer: own.samples_per_sec for peer, own in peers.items() if own.samples_per_sec > 0.0}
        self.averager.expect({peer: speed * round_seconds for peer, speed in known.items()})
        self.look()

    def after_round(self, index: int, peers: Mapping[str, Progress], result: Round | None = None) -> None:
        """Take note of what the averager has found out in the round, and of what this peer makes of its ``result``."""
        names: dict[str, str] = {}
        for found in self.averager.findings():
            self._credit(found, peers)
            names |= found.names
            for verdict in found.verdicts[:_MOST_EVENTS]:
                name = _name(verdict.peer, peers, found.names)
                self._tell(verdict, index, name, f"{name} was left out of round {index + 1}")
            for peer, why in self._strikes.note(found.verdicts, found.members).items():
                self._ban(peer, why, index, _name(peer, peers, found.names))
        if result is not None:
            for verdict in result.untrue:
                name = _name(verdict.peer, peers, names)
                self._tell(verdict, index, name, f"What {name} has averaged in round {index + 1} is not used")
            for peer, why in self._as_reducers.note(result.untrue, result.reducers).items():
                if self.judges_reducers:
                    self._ban(peer, why, index, _name(peer, peers, names))
        self.look()

    def _ban(self, peer: str, why: str, index: int, name: str) -> None:
        if not (out := self.invitation_of(peer)) or out in self.bans.read():
            return  # nobody can be banned with it; or it is, with another peer of its invitation
        ban = Ban(out, name, why)
        self.bans.add(ban)
        self._told.add(ban.id)
        self.remark("peer_banned", peer=peer, name=name, why=why, round=index + 1)
        lift = terminal.command("swarm", "unban", name)
        self.say(f"  {name} is banned after {STRIKES} such rounds in a row. To lift it: {lift}")

    def look(self) -> None:
        """Enforce the bans as they are by now: others pronounce them too, and a command lifts them. Cheap."""
        banned = self.bans.read()
        if banned.keys() == self._enforced:
            return
        for ban in banned.values():
            if ban.id not in self._enforced and ban.id not in self._told and ban.time >= self._began:
                name, why = terminal.name(ban.name), terminal.one_line(ban.why, 200)
                self.remark("peer_banned", peer=ban.id, name=name, why=why)
                self.say(f"  {name} is banned by another peer of the owner's side: {why}")
        self._told.clear()
        self.enforce(banned)
        self._enforced.clear()
        self._enforced.update(banned)

    def _credit(self, found: Any, peers: Mapping[str, Progress]) -> None:
        """Who has just come may not have told its name yet: its first round is credited with the next one."""
        now: list[Counted] = []
        late, self._unnamed = self._unnamed, {}
        for peer, samples in found.counted.items():
            counted = Counted(_name(peer, peers, found.names), samples, found.received.get(peer, 0))
            if peer in peers or found.names.get(peer, GUESTS) not in (GUESTS, RANKS):
                now.append(counted)
            else:
                self._unnamed[peer] = counted
        if late:
            self.credit([replace(item, name=_name(peer, peers, found.names)) for peer, item in late.items()])
        self.credit(now)

    def _tell(self, verdict: Verdict, index: int, name: str, what: str) -> None:
        self.remark(_EVENTS[verdict.action], peer=verdict.peer, name=name, why=verdict.why, round=index + 1)
        if verdict.action != "clipped":
            self.say(f"  {what}: {verdict.why}")


def _name(peer: str, peers: Mapping[str, Progress], invited: Mapping[str, str]) -> str:
    said = peers[peer].name if peer in peers else f"..{peer[-6:]}"
    return terminal.name(credited(invited.get(peer, ""), said))
