"""Bans of a run: who was left out of averages, how often in a row, and who may not come back.

The whole owner's side has one list. Its ids are those of peers, and of the invitations by which they came: a banned
guest does not come back with a new key. Every reducer keeps the list in its run folder and signs what it tells the
others of it; of what is said about an id, what was said last counts. So a ban outlives the peer that pronounced it, and
lifting it anywhere lifts it everywhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from trainkit import fileio, terminal
from trainkit.errors import RefusedError, UserError
from trainkit.run.events import Remark
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Counted
from trainkit.swarm.access import BANNED, REVOKED
from trainkit.swarm.admission import KEY_FILE, Admission, Member, entries, owner_of, remember
from trainkit.swarm.invitations import GUESTS, RANKS, Pass, UntrustedError, credited, date, parsed
from trainkit.swarm.messages import PeerProgress

if TYPE_CHECKING:  # `swarm status` reads bans without torch
    from trainkit.swarm.robust import Action, Findings, Round, Verdict

# Rounds in a row in which a peer's contribution was dropped; one may be a fault on the way, or of a broken GPU.
STRIKES = 3
# Of them at once; strangers can make up as many ids as they like.
_MOST_BANS = 1000
_MOST_SUSPECTS = 1000
# A list as it is told; a record of the DHT holds no more. The newest are told.
_LONGEST_LIST = 60_000
# A word from so far in the future would be the last one for ever; clocks agree within three seconds.
_AHEAD_SECONDS = 60.0

FILE = "bans.jsonl"


_Text = Annotated[str, Field(max_length=200)]


class Ban(NamedTuple):
    """Somebody who may not take part any more; or, ``lifted``, may again."""

    id: _Text
    """Of a peer, or of an invitation."""
    name: _Text
    why: _Text
    time: Annotated[float, Field(ge=0, le=fileio.LATEST)] = 0.0
    """When it was said, in seconds since 1970."""
    lifted: bool = False


_LIST = TypeAdapter(list[Ban])


class Bans:
    """The list. In a run folder each line bans or lifts a ban, so that a run and a command can both write."""

    def __init__(self, file: Path | None = None) -> None:
        """``file``: None for a list that ends with its peer, or until `keep_in`."""
        self._file = file
        self._said: dict[str, Ban] = {}
        self._stamp: tuple[int, int] | None = None

    def keep_in(self, file: Path) -> None:
        """From now on there, with what is there already."""
        said, self._file = list(self.said()), file
        self.merge(said)

    def read(self) -> dict[str, Ban]:
        """Id -> ban, as it is now; cheap when nothing has changed."""
        return {ban.id: ban for ban in self.said() if not ban.lifted}

    def said(self) -> Iterable[Ban]:
        """The last word about each id, oldest first; also of bans that were lifted."""
        if self._file is not None:
            with suppress(FileNotFoundError):
                status = self._file.stat()
                stamp = (status.st_size, status.st_mtime_ns)
                if stamp != self._stamp:
                    self._stamp = stamp
                    for ban in _read(self._file):
                        self._note(ban)
        return self._said.values()

    def add(self, ban: Ban) -> None:
        """From now on."""
        if ban.id not in self.read():
            self._write_if_room(ban._replace(time=time.time()))

    def lift(self, name: str) -> list[Ban]:
        """Let those of that name (or id) take part again; who they were. Raises OSError."""
        found = [ban for ban in self.read().values() if name in (ban.name, ban.id)]
        for ban in found:
            self._write(ban._replace(time=time.time(), lifted=True))
        return found

    def merge(self, others: Iterable[Ban]) -> None:
        """Take over what others have said later than what is known here."""
        known = {ban.id: ban for ban in self.said()}
        for ban in others:
            if ban.id not in known or ban.time > known[ban.id].time:
                self._write_if_room(ban)

    def _write_if_room(self, ban: Ban) -> None:
        with suppress(OSError):  # a full disk: it holds as long as this peer lives, and others know of it
            self._write(ban)

    def _write(self, ban: Ban) -> None:
        self._note(ban)
        if self._file is not None:
            record = ban._asdict()
            fileio.append_jsonl(self._file, {key: value for key, value in record.items() if value is not False})

    def _note(self, ban: Ban) -> None:
        known = self._said.get(ban.id)
        if known is None or known.time <= ban.time:
            remember(self._said, ban.id, ban, _MOST_BANS)


def bans_list(own: Pass, bans: Iterable[Ban]) -> bytes:
    """What this peer tells the others of who is banned, signed."""
    rows: list[bytes] = []
    room = _LONGEST_LIST
    for ban in reversed(list(bans)):
        short = ban._replace(name=ban.name[: terminal.LONGEST_NAME], why=ban.why[:200])
        row = json.dumps(short, ensure_ascii=False).encode()
        room -= len(row) + 1
        if room < 0:
            break
        rows.append(row)
    return own.state("bans", b"[" + b",".join(reversed(rows)) + b"]")


def read_bans(admission: Admission, statement: bytes, *, now: float | None = None) -> list[Ban]:
    """What somebody of the owner's side says about who is banned.

    Raises UntrustedError when a volunteer or a stranger has signed it.
    """
    found = admission.read(statement, "bans", now=now)
    if found.grant.role == "volunteer":
        raise UntrustedError("a volunteer bans nobody")
    latest = (time.time() if now is None else now) + _AHEAD_SECONDS
    return [ban for ban in parsed(_LIST, found.content, "list of bans") if ban.time <= latest]


def banned_with(member: Member | None, peer_id: str, own_id: str) -> str:
    """What is banned with a peer, by ``own_id``; empty for whom it must not ban.

    A volunteer goes with its invitation, or it would come back with a new key. Only the peer: of the owner's side, and
    of an invitation for many, or one of them could have all the others banned. Nobody: the owner, without whom there is
    no run, and oneself. Two newcomers are a majority against either, and what they send is unlike theirs.
    """
    if peer_id == own_id or (member is not None and member.role == "owner"):
        return ""
    return peer_id if member is None or member.trusted or member.name == GUESTS else member.invitation


def unban(run: Path, name: str) -> list[Ban]:
    """Let those of that name take part again in the run of a folder; the run reads it before its next round.

    Raises UserError when nobody of that name is banned.
    """
    bans = Bans(run / FILE)
    lifted = bans.lift(name)
    if not lifted:
        names = sorted({terminal.name(ban.name) for ban in bans.read().values()})
        raise UserError(
            f"Nobody called {terminal.name(name)} is banned from {run.name}.",
            why=f"Banned are: {', '.join(names[:20])}." if names else "Nobody is banned from it.",
            fix="Give the name as the run has printed it, or the run behind it.",
        )
    return lifted


class Strikes:
    """Rounds in a row in which each peer's contribution was dropped."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def note(self, verdicts: Iterable[Verdict], took_part: Iterable[str]) -> dict[str, str]:
        """Take in a round. Peer id -> why, of those for whom it was one too many.

        Args:
            took_part: ids of all peers in the round; one that was not in it neither gains nor loses by it.
        """
        dropped = {verdict.peer: verdict.why for verdict in verdicts if verdict.action == "dropped"}
        neither = {verdict.peer for verdict in verdicts if verdict.action == "left out"}
        for peer in set(took_part) - dropped.keys() - neither:
            self.counts.pop(peer, None)
        for peer in dropped:
            remember(self.counts, peer, self.counts.get(peer, 0) + 1, _MOST_SUSPECTS)
        out = {peer: why for peer, why in dropped.items() if self.counts.get(peer, 0) >= STRIKES}
        for peer in out:
            del self.counts[peer]
        return out


def _read(file: Path) -> Iterable[Ban]:
    for record in fileio.read_jsonl(file):
        if isinstance(record.get("id"), str):
            name, why = (text if isinstance(text := record.get(key), str) else "" for key in ("name", "why"))
            said = record.get("time")
            yield Ban(
                record["id"], name, why, float(said) if fileio.is_time(said) else 0.0, record.get("lifted") is True
            )


# Who is out: invitations that the owner has revoked, and bans by its side; as this peer has heard, and passes on.
#
# Both are signed lists in the DHT. Whoever is of the owner's side stores them anew in every round, so that they
# outlive whoever has made them. Those who are out may still ask for these lists, and for nothing else: so they learn
# of it.


class Excluded:
    """What one peer knows of it."""

    def __init__(self, own: Pass, peer_id: str, admission: Admission) -> None:
        self._own, self._peer_id, self._admission = own, peer_id, admission
        self._revoked = b""
        self.bans = Bans()

    def remember(self, folder: Path) -> None:
        """What the owner has decided so far, by the run's folder, before anybody else can ask."""
        # A submitted run has a folder before it has a key.
        if (folder / KEY_FILE).exists() and (revoked := owner_of(folder).revoked()):
            self.hear(REVOKED, revoked)
        self.bans.keep_in(folder / FILE)
        self._admission.ban(self.bans.read())

    def hear(self, key: str, statement: bytes) -> None:
        """Take over what somebody says. Bans count once `Sentry` has seen them.

        Raises UntrustedError unless it is signed by somebody who may say so.
        """
        if key == BANNED:
            self.bans.merge(read_bans(self._admission, statement))
        elif self._admission.revoke(statement):
            self._revoked = statement

    def take(self, key: str, found: Any) -> None:
        """Take over what the DHT has returned for one of the two lists."""
        for entry in entries(found):
            with suppress(UntrustedError):
                self.hear(key, entry.value)

    def told(self) -> dict[str, bytes]:
        """Record's key -> what this peer tells others; nothing, if it is a volunteer: they would not believe it."""
        if self._own.grant.role == "volunteer":
            return {}
        said = list(self.bans.said())
        told = {REVOKED: self._revoked, BANNED: bans_list(self._own, said) if said else b""}
        return {key: statement for key, statement in told.items() if statement}

    def require_welcome(self) -> None:
        """Raises RefusedError, in words for the person at this machine, if this very peer is out."""
        grant, bans = self._own.grant, self.bans.read()
        ban = bans.get(self._peer_id) or bans.get(grant.id)
        if grant.id in self._admission.revoked:
            raise RefusedError(
                "Your invitation was revoked.",
                why=f"The owner of the run has ended the invitations of {grant.name}.",
                fix="Ask whoever runs it for another.",
            )
        if ban is not None and grant.role != "owner":
            lift = terminal.command("swarm", "unban", terminal.name(ban.name))
            raise RefusedError(
                "You were banned from the run.",
                why=f"{STRIKES} times in a row your part of a round was left out: {terminal.one_line(ban.why, 200)}.",
                fix=f"See whether this machine computes nonsense; whoever runs it may lift it: {lift}",
            )
        if grant.expires <= time.time():
            raise RefusedError(
                "Your invitation has expired.",
                why=f"It was good until {date(grant.expires)}.",
                fix="Ask whoever runs it for another.",
            )


# What a reducer does about those whose contributions it had to drop: events, strikes, bans; once a round.

# Events and lines of one round; a flood of liars must not become a flood of records.
_MOST_EVENTS = 20
_EVENTS: Mapping[Action, Remark] = {
    "dropped": "peer_dropped",
    "left out": "peer_left_out",
    "clipped": "peer_clipped",
}


@dataclass
class Sentry:
    """Keeps watch over one reducer's rounds."""

    averager: Any
    """Is told what its group can have trained on, and tells its findings (`trainkit.swarm.exchange`)."""
    bans: Bans
    remark: Callable[..., None] = lambda kind, **facts: None
    """Writes an event."""
    say: Callable[[str], None] = lambda line: None
    enforce: Callable[[Collection[str]], None] = lambda banned: None
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

    def before_round(self, peers: Mapping[str, PeerProgress], round_seconds: float) -> None:
        """Tell the averager what peers can have trained on, by the speed that they have published; before its first
        round a peer has none to tell of."""
        known = {peer: own.samples_per_sec for peer, own in peers.items() if own.samples_per_sec > 0.0}
        self.averager.expect({peer: speed * round_seconds for peer, speed in known.items()})
        self.look()

    def after_round(self, index: int, peers: Mapping[str, PeerProgress], result: Round | None = None) -> None:
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
        self._enforced = set(banned)

    def _credit(self, found: Findings, peers: Mapping[str, PeerProgress]) -> None:
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


def _name(peer: str, peers: Mapping[str, PeerProgress], invited: Mapping[str, str]) -> str:
    said = peers[peer].name if peer in peers else f"..{peer[-6:]}"
    return terminal.name(credited(invited.get(peer, ""), said))
