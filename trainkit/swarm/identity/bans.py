"""Bans: who may no longer take part, and who may say so.

The owner's side shares one list of bans (``bans.jsonl``): every reducer keeps it and signs what it tells the others of
it, and what was said last about an id counts. So a ban outlives the peer that pronounced it, and lifting it anywhere
lifts it everywhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import RefusedError
from trainkit.swarm.identity import admission, invitations
from trainkit.swarm.identity.admission import Admission, Member
from trainkit.swarm.identity.invitations import Pass, UntrustedError
from trainkit.swarm.protocol import messages
from trainkit.swarm.protocol.messages import BANNED, REVOKED

BANS_FILE = "bans.jsonl"
STRIKES = 3
"""Rounds in a row with a dropped contribution after which a peer is banned; one may be a fault on the way."""
# Bytes of a list as it is told; a record of the DHT holds no more. The newest are told.
_LONGEST_LIST = 60_000
# A ban from further in the future would be the last word for ever; clocks agree within three seconds.
_AHEAD_SECONDS = 60.0
_Text = Annotated[str, Field(max_length=200)]


class Ban(NamedTuple):
    """Somebody who may not take part any more; or, ``lifted``, may again."""

    id: _Text
    """Id of a peer, or of an invitation: then a banned guest does not come back with a new key."""
    name: _Text
    why: _Text
    time: Annotated[float, Field(ge=0, le=fileio.LATEST)] = 0.0
    """When it was said, in seconds since 1970."""
    lifted: bool = False


_BANS = TypeAdapter(list[Ban])


class Bans:
    """The list. In a run folder each line bans or lifts a ban, so that a run and a command can both write."""

    def __init__(self, file: Path | None = None) -> None:
        """``file``: None for a list that ends with its peer, or until `keep_in`."""
        self._file = file
        self._said: dict[str, Ban] = {}

    def keep_in(self, folder: Path) -> None:
        """From now on in the run's folder, with what is there already."""
        said = list(self.said())
        self._said = {}
        self._file = folder / BANS_FILE
        self.merge(said)

    def read(self) -> dict[str, Ban]:
        """Id -> ban, as it is now."""
        return {ban.id: ban for ban in self.said() if not ban.lifted}

    def said(self) -> Iterable[Ban]:
        """The last word about each id, oldest first; also of bans that were lifted."""
        if self._file is not None:
            for record in jsonl.read_jsonl(self._file):
                if isinstance(record.get("id"), str):  # whatever else is damaged, somebody was banned
                    self._note(_ban_of(record))
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
        self.said()
        for ban in others:
            known = self._said.get(ban.id)
            if known is None or ban.time > known.time:
                self._write_if_room(ban)

    def _write_if_room(self, ban: Ban) -> None:
        with suppress(OSError):  # a full disk: it holds as long as this peer lives, and others know of it
            self._write(ban)

    def _write(self, ban: Ban) -> None:
        self._note(ban)
        if self._file is not None:
            jsonl.append_jsonl(self._file, {key: value for key, value in ban._asdict().items() if value is not False})

    def _note(self, ban: Ban) -> None:
        known = self._said.get(ban.id)
        if known is None or known.time <= ban.time:
            admission.remember(self._said, ban.id, ban)  # strangers can make up as many ids as they like


def _ban_of(record: dict[str, Any]) -> Ban:
    name, why = (text if isinstance(text, str) else "" for text in (record.get("name"), record.get("why")))
    when = float(record["time"]) if jsonl.is_time(record.get("time")) else 0.0
    return Ban(record["id"], name, why, when, lifted=record.get("lifted") is True)


def bans_list(own: Pass, bans: Iterable[Ban]) -> bytes:
    """Return what this peer tells the others of who is banned, signed."""
    short = [ban._replace(name=ban.name[: terminal.LONGEST_NAME], why=ban.why[:200]) for ban in bans]
    told = json.dumps(short, ensure_ascii=False).encode()
    while len(told) > _LONGEST_LIST:
        del short[: len(short) // 10 + 1]
        told = json.dumps(short, ensure_ascii=False).encode()
    return own.state("bans", told)


def read_bans(admission: Admission, statement: bytes) -> list[Ban]:
    """Return what somebody of the owner's side says about who is banned.

    Raises UntrustedError when a volunteer or a stranger has signed it.
    """
    told = admission.told(statement, "bans", _BANS)
    return [ban for ban in told if ban.time <= time.time() + _AHEAD_SECONDS]


def banned_with(member: Member | None, peer_id: str, own_id: str) -> str:
    """Return what is banned with a peer, by ``own_id``; empty for whom it must not ban.

    A volunteer goes with its invitation, or it would come back with a new key. Of the owner's side, and of an
    invitation for many, only the peer goes, or one of them could have all the others banned. Nobody bans the owner,
    without whom there is no run, or itself: two newcomers are a majority against either.
    """
    if peer_id == own_id or (member is not None and member.role == "owner"):
        return ""
    if member is None or member.trusted or member.name == invitations.GUESTS:
        return peer_id
    return member.invitation


class Excluded:
    """Knowledge of one peer of who is out: invitations that the owner has revoked, and bans by its side.

    Both are signed lists in the DHT. Whoever is of the owner's side stores them anew in every round, so that they
    outlive whoever has made them. Who is out may still ask for these lists, and for nothing else, and so learns of it.
    """

    def __init__(self, own: Pass, peer_id: str, admission: Admission) -> None:
        self._own = own
        self._peer_id = peer_id
        self._admission = admission
        self._revoked = b""
        self.bans = Bans()

    def remember(self, folder: Path, revoked: bytes) -> None:
        """Take over what the run's folder says, and the owner's list of who is ``revoked``, before anybody can ask."""
        if revoked:
            self.hear(REVOKED, revoked)
        self.bans.keep_in(folder)
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
        for statement in messages.records_in(key, found).values():
            with suppress(UntrustedError):
                self.hear(key, statement)

    def told(self) -> dict[str, bytes]:
        """Record's key -> what this peer tells others; nothing, if it is a volunteer: they would not believe it."""
        if self._own.grant.role == "volunteer":
            return {}
        said = list(self.bans.said())
        told = {REVOKED: self._revoked, BANNED: bans_list(self._own, said) if said else b""}
        return {key: statement for key, statement in told.items() if statement}

    def require_welcome(self) -> None:
        """Raises RefusedError, in words for the person at this machine, if this very peer is out."""
        grant = self._own.grant
        bans = self.bans.read()
        fix = "Ask its owner for another."
        ban = bans.get(self._peer_id) or bans.get(grant.id)
        if grant.id in self._admission.revoked:
            why = f"The owner of the run has ended the invitations of {grant.name}."
            raise RefusedError("Your invitation was revoked.", why=why, fix=fix)
        if ban is not None and grant.role != "owner":
            lift = terminal.command("swarm", "unban", terminal.name(ban.name))
            why = f"{STRIKES} times in a row your part of a round was left out: {terminal.one_line(ban.why, 200)}."
            fix = f"Check whether this machine computes correctly; the owner may lift the ban: {lift}"
            raise RefusedError("You were banned from the run.", why=why, fix=fix)
        if grant.expires <= time.time():
            why = f"It was good until {invitations.date(grant.expires)}."
            raise RefusedError("Your invitation has expired.", why=why, fix=fix)
