"""Who is out: invitations that the owner has revoked, and bans by its side; as this peer has heard, and passes on.

Both are signed lists in the DHT. Whoever is of the owner's side stores them anew in every round, so that they outlive
whoever has made them. Those who are out may still ask for these lists, and for nothing else: so they learn of it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit import terminal
from trainkit.collaborative.admission import Admission
from trainkit.collaborative.bans import FILE, STRIKES, Bans, bans_list, read_bans
from trainkit.collaborative.invitation import Pass, date
from trainkit.collaborative.owner import KEY_FILE, owner_of
from trainkit.collaborative.signed_records import BANNED, REVOKED
from trainkit.collaborative.signing import UntrustedError
from trainkit.errors import RefusedError


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
        for entry in found.value.values() if found is not None and isinstance(found.value, dict) else ():
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
