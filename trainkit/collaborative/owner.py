"""The run's key and what its owner has decided, in the run folder: ``owner.key``, ``invited.jsonl``, ``revoked``.

Only ``owner.key`` is a secret: whoever has it decides who takes part. It never leaves the run folder, where only its
owner can read it (0600). The list of invitations has no secret in it: a token is printed once and kept nowhere.
"""

from __future__ import annotations

import base64
import math
import time
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from trainkit import reading, terminal
from trainkit.collaborative.admission import revoked_list
from trainkit.collaborative.invitation import Pass, Role, as_name, grant
from trainkit.collaborative.signing import Key
from trainkit.errors import UserError
from trainkit.records import files, jsonl

KEY_FILE = "owner.key"
INVITED_FILE = "invited.jsonl"
REVOKED_FILE = "revoked"

# What the owner grants itself lasts longer than any run.
_FOR_EVER = 20 * 365 * 86400.0


class Owner:
    """The owner of a run, by its folder."""

    def __init__(self, folder: Path, key: Key) -> None:
        self.key, self._folder = key, folder

    @property
    def run(self) -> str:
        """The run's name."""
        return self._folder.name

    def invite(self, name: str, role: Role, seconds: float) -> Pass:
        """An invitation for so long, and a line about it in the list.

        Raises UserError when the name is none.
        """
        if not (0 < len(name) <= terminal.LONGEST_NAME and name.isprintable() and name == terminal.name(name)):
            why = f"It has 1 to {terminal.LONGEST_NAME} letters, single spaces between words, and nothing invisible."
            raise UserError("That is no name for an invitation.", why=why, fix="Use a short one.")
        made = grant(self.key, self.run, name, role, time.time() + seconds)
        about = {"time": time.time(), "name": name, "role": role, "expires": made.grant.expires, "id": made.grant.id}
        jsonl.append(self._folder / INVITED_FILE, about)
        return made

    def revoke(self, name: str) -> bytes:
        """Revoke all invitations of that name; the signed list of everything that was revoked so far.

        Raises UserError when nobody of that name was invited.
        """
        invited = list(jsonl.read(self._folder / INVITED_FILE))
        ids = [str(line["id"]) for line in invited if line.get("name") == name]
        if not ids:
            names = sorted({str(line.get("name")) for line in invited})
            raise UserError(
                f"Nobody was invited as '{name}'.",
                why=f"Invited to {self.run}: {', '.join(names) or 'nobody'}.",
                fix="Give the name of an invitation, as `python -m jobs.swarm invite` was given it.",
            )
        for item in ids:
            jsonl.append(self._folder / INVITED_FILE, {"time": time.time(), "id": item, "revoked": True})
        revoked = {*ids, *(str(line["id"]) for line in invited if line.get("revoked"))}
        # Those that have expired need not be named any more.
        expired = {str(line["id"]) for line in invited if float(line.get("expires") or math.inf) <= time.time()}
        return self._write_revoked(revoked - expired)

    def revoked(self) -> bytes | None:
        """The list that `revoke` has made last; None if nobody was revoked yet."""
        try:
            return base64.b64decode(reading.read_bytes(self._folder / REVOKED_FILE))
        except (OSError, ValueError):
            return None

    def _write_revoked(self, ids: set[str]) -> bytes:
        # Time makes a good serial: it grows, whichever machine with this folder it is.
        statement = revoked_list(own_pass(self.key, "owner"), time.time_ns() // 1_000_000, ids)
        files.write(self._folder / REVOKED_FILE, base64.b64encode(statement), self._folder)
        return statement


def own_pass(key: Key, name: str, role: Role = "owner") -> Pass:
    """A pass for a peer of the owner's own; it is on no list."""
    return grant(key, "own", as_name(name), role, time.time() + _FOR_EVER)


def owner_of(folder: Path) -> Owner:
    """The owner of the run in ``folder``.

    Raises UserError when there is no key, it can be read by others, or it is none.
    """
    file = folder / KEY_FILE
    if not file.exists():
        raise UserError(
            f"{folder.name} was not created here.",
            why=f"There is no {KEY_FILE} in {folder}: only the creator of a swarm has it.",
            fix="Name a run that `python -m jobs.swarm create` has made on this machine.",
        )
    try:
        if file.stat().st_mode & 0o077:
            raise UserError(
                f"Others can read {file}.",
                why="Whoever has that key decides who takes part in the run.",
                fix=f"chmod 600 {file}",
            )
        private = serialization.load_pem_private_key(reading.read_bytes(file, follow=True), password=None)
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError("it is a key of another kind")
        return Owner(folder, Key(private.private_bytes_raw()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} is no key of a run.",
            why=f"{getattr(error, 'strerror', None) or error}.",
            fix="Restore it from a copy; without it nobody can be invited any more.",
        ) from None


def key_of(folder: Path) -> Key:
    """The key of a run that goes on; of one that begins, a new one, to be kept by `keep_key`.

    Raises UserError as `owner_of` does.
    """
    return owner_of(folder).key if (folder / KEY_FILE).exists() else Key.generate()


def keep_key(folder: Path, key: Key) -> Owner:
    """Write the run's key into its folder, unless it is there already."""
    file = folder / KEY_FILE
    if file.exists():
        owner = owner_of(folder)
        assert owner.key.public == key.public, "a run has one key"
        return owner
    pem = Ed25519PrivateKey.from_private_bytes(key.seed).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files.write(file, pem, folder, private=True)
    return Owner(folder, key)
