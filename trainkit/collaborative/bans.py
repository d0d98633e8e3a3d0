"""Who was left out of averages, how often in a row, and who may not come back: one list for the whole owner's side.

Ids are those of peers, and of the invitations by which they came: a banned guest does not come back with a new key.
Whoever reduces keeps the list in its run folder and signs what it tells the others of it; of what is said about an id,
what was said last counts. So a ban outlives whoever has pronounced it, and lifting it anywhere lifts it everywhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import reading, terminal
from trainkit.collaborative.admission import Admission, Member
from trainkit.collaborative.invitation import GUESTS, Pass
from trainkit.collaborative.signing import UntrustedError
from trainkit.errors import UserError
from trainkit.records import jsonl

if TYPE_CHECKING:
    from trainkit.collaborative.screening import Verdict

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


@dataclass(frozen=True)
class Ban:
    """Somebody who may not take part any more; or, ``lifted``, may again."""

    id: str
    """Of a peer, or of an invitation."""
    name: str
    why: str
    time: float = 0.0
    """When it was said, in seconds since 1970."""
    lifted: bool = False


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
            self._write_if_room(replace(ban, time=time.time()))

    def lift(self, name: str) -> list[Ban]:
        """Let those of that name (or id) take part again; who they were. Raises OSError."""
        found = [ban for ban in self.read().values() if name in (ban.name, ban.id)]
        for ban in found:
            self._write(replace(ban, time=time.time(), lifted=True))
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
            jsonl.append(self._file, {key: value for key, value in asdict(ban).items() if value is not False})

    def _note(self, ban: Ban) -> None:
        known = self._said.get(ban.id)
        if known is not None and known.time > ban.time:
            return
        self._said.pop(ban.id, None)
        self._said[ban.id] = ban
        if len(self._said) > _MOST_BANS:
            del self._said[next(iter(self._said))]


def bans_list(own: Pass, bans: Iterable[Ban]) -> bytes:
    """What this peer tells the others of who is banned, signed."""
    rows: list[bytes] = []
    room = _LONGEST_LIST
    for ban in reversed(list(bans)):
        row = json.dumps(
            [ban.id, ban.name[: terminal.LONGEST_NAME], ban.why[:200], ban.time, ban.lifted], ensure_ascii=False
        ).encode()
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
    try:
        bans = [Ban(*row) for row in reading.parse(found.content)]
    except (ValueError, TypeError, RecursionError) as error:
        raise UntrustedError("it is no list of bans") from error
    for ban in bans:
        texts = all(isinstance(text, str) and len(text) <= 200 for text in (ban.id, ban.name, ban.why))
        if not (texts and type(ban.lifted) is bool and reading.is_time(ban.time)):
            raise UntrustedError("it is no list of bans")
    return [ban for ban in bans if ban.time <= latest]


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


@dataclass
class Strikes:
    """Rounds in a row in which each peer's contribution was dropped."""

    counts: dict[str, int] = field(default_factory=dict)

    def note(self, verdicts: Iterable[Verdict], took_part: Iterable[str]) -> dict[str, str]:
        """Take in a round. Peer id -> why, of those for whom it was one too many.

        Args:
            took_part: ids of all who were in the round; who was not neither gains nor loses by it.
        """
        judged = list(verdicts)
        dropped = {verdict.peer: verdict.why for verdict in judged if verdict.action == "dropped"}
        neither = {verdict.peer for verdict in judged if verdict.action == "left out"}
        for peer in set(took_part) - dropped.keys() - neither:
            self.counts.pop(peer, None)
        out: dict[str, str] = {}
        for peer, why in dropped.items():
            self.counts[peer] = self.counts.pop(peer, 0) + 1
            if self.counts[peer] >= STRIKES:
                del self.counts[peer]
                out[peer] = why
        while len(self.counts) > _MOST_SUSPECTS:
            del self.counts[next(iter(self.counts))]
        return out


def _read(file: Path) -> Iterable[Ban]:
    for record in jsonl.read(file):
        if isinstance(record.get("id"), str):
            said = record.get("time")
            yield Ban(
                record["id"],
                _text(record, "name"),
                _text(record, "why"),
                float(said) if reading.is_time(said) else 0.0,
                record.get("lifted") is True,
            )


def _text(record: Mapping[str, object], key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) else ""
