"""What a reducer does about those whose contributions it had to drop: events, strikes, bans; once a round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trainkit import terminal
from trainkit.collaborative.bans import FILE, STRIKES, Ban, Bans, Strikes
from trainkit.collaborative.messages import Progress
from trainkit.collaborative.screening import Verdict
from trainkit.records.contributions import Counted
from trainkit.records.rundir import RunDir

# Events and lines of one round; a flood of liars must not become a flood of records.
_MOST_EVENTS = 20


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
    """Peer id -> what is banned with it: its invitation, or itself."""
    credit: Callable[[Collection[Counted]], None] = lambda counted: None
    """Takes note of who has contributed to a round."""
    _strikes: Strikes = field(default_factory=Strikes)
    _enforced: frozenset[str] = frozenset()
    _unnamed: dict[str, float] = field(default_factory=dict)

    def keeping(self, run_dir: RunDir, remark: Callable[..., None]) -> Sentry:
        """The same with a memory: bans in that run folder, and events."""
        return replace(self, bans=Bans(run_dir.path / FILE), remark=remark)

    def before_round(self, peers: Mapping[str, Progress], round_seconds: float) -> None:
        """Tell the averager what peers can have trained on, by the speed that they have published."""
        self.averager.expect({peer: own.samples_per_sec * round_seconds for peer, own in peers.items()})
        self._enforce()

    def after_round(self, index: int, peers: Mapping[str, Progress]) -> None:
        """Take note of what the averager has found out in the round."""
        for found in self.averager.findings():
            self._credit(found.counted, peers)
            for verdict in found.verdicts[:_MOST_EVENTS]:
                self._tell(verdict, index, _name(verdict.peer, peers))
            for peer, why in self._strikes.note(found.verdicts, found.members).items():
                name = _name(peer, peers)
                self.bans.add(Ban(self.invitation_of(peer), name, why))
                self.remark("peer_banned", peer=peer, name=name, why=why, round=index + 1)
                lift = terminal.command("swarm", "unban", name)
                self.say(f"  {name} is banned after {STRIKES} such rounds in a row. To lift it: {lift}")
        self._enforce()

    def _credit(self, counted: Mapping[str, float], peers: Mapping[str, Progress]) -> None:
        """Who has just come may not have told its name yet: its first round is credited with the next one."""
        late, self._unnamed = self._unnamed, {peer: samples for peer, samples in counted.items() if peer not in peers}
        if late:
            self.credit([Counted(_name(peer, peers), samples) for peer, samples in late.items()])
        self.credit([Counted(_name(peer, peers), samples) for peer, samples in counted.items() if peer in peers])

    def _tell(self, verdict: Verdict, index: int, name: str) -> None:
        kind = "peer_dropped" if verdict.action == "dropped" else "peer_clipped"
        self.remark(kind, peer=verdict.peer, name=name, why=verdict.why, round=index + 1)
        if verdict.action == "dropped":
            self.say(f"  {name} was left out of round {index + 1}: {verdict.why}")

    def _enforce(self) -> None:
        """Also what somebody has changed by hand meanwhile."""
        banned = frozenset(self.bans.read())
        if banned != self._enforced:
            self.enforce(banned)
            self._enforced = banned


def _name(peer: str, peers: Mapping[str, Progress]) -> str:
    return terminal.one_line(peers[peer].name, 64) if peer in peers else f"..{peer[-6:]}"
