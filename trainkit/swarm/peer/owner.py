"""The owner of a swarm: its key, invitations and revocations, kept in the run's folder."""

import base64
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import TrainkitError, UserError
from trainkit.run.find import find_run, list_runs, runs_root
from trainkit.run.folder import RunDir
from trainkit.swarm.identity import invitations
from trainkit.swarm.identity.admission import revoked_list
from trainkit.swarm.identity.invitations import LONGEST_FILE, TOKEN_VARIABLE, Pass
from trainkit.swarm.network import processes
from trainkit.swarm.peer import place
from trainkit.swarm.protocol import messages
from trainkit.swarm.protocol.messages import REVOKED

KEY_FILE = "owner.key"
_INVITED_FILE = "invited.jsonl"
_REVOKED_FILE = "revoked"
ANCHOR = ("swarm", "anchor", "--carry")
"""Command on the machine through which others reach a creator behind a router."""
NEEDS_FILE = "requirements.txt"
"""Libraries of the run's creator, as `pip install -r` takes them."""
# What the owner grants itself lasts longer than any run.
_FOR_EVER = 20 * 365 * 86400.0


class Owner:
    """The owner of a run, by its folder."""

    def __init__(self, folder: Path, key: invitations.Key) -> None:
        self.key = key
        self.folder = folder
        self._invited = folder / _INVITED_FILE

    def invite(self, name: str, role: invitations.Role, seconds: float) -> Pass:
        """An invitation that is valid for a time, and a line about it in the list.

        Raises UserError when the name is none.
        """
        if not (0 < len(name) <= terminal.LONGEST_NAME and name.isprintable() and name == terminal.name(name)):
            why = f"It has 1 to {terminal.LONGEST_NAME} letters, single spaces between words, and nothing invisible."
            raise UserError("That is not a valid name for an invitation.", why=why, fix="Use a short name.")
        made = invitations.grant(self.key, self.folder.name, name, role, time.time() + seconds)
        about = {"time": time.time(), "name": name, "role": role, "expires": made.grant.expires, "id": made.grant.id}
        jsonl.append_jsonl(self._invited, about)
        return made

    def revoke(self, name: str) -> bytes:
        """Revoke all invitations of that name; the signed list of everything that was revoked so far.

        Raises UserError when nobody of that name was invited.
        """
        lines = list(jsonl.read_jsonl(self._invited))
        names = {str(line["name"]) for line in lines if "name" in line}
        ids = [str(line["id"]) for line in lines if line.get("name") == name]
        revoked = {str(line["id"]) for line in lines if line.get("revoked")}
        now = time.time()  # what has expired need not be named any more
        expired = {str(line["id"]) for line in lines if float(line.get("expires") or math.inf) <= now}
        if not ids:
            why = f"Invited to {self.folder.name}: {', '.join(sorted(names)) or 'nobody'}."
            fix = "Give the name of an invitation, as `python -m jobs.swarm invite` was given it."
            raise UserError(f"Nobody was invited as '{name}'.", why=why, fix=fix)
        for item in ids:
            jsonl.append_jsonl(self._invited, {"time": now, "id": item, "revoked": True})
        # Time makes a good serial: it grows, whichever machine with this folder it is.
        serial = time.time_ns() // 1_000_000
        statement = revoked_list(own_pass(self.key, "owner"), serial, revoked.union(ids) - expired)
        fileio.write(self.folder / _REVOKED_FILE, base64.b64encode(statement), self.folder)
        return statement


def revoked_in(folder: Path) -> bytes:
    """The list that `Owner.revoke` has made last; empty if nobody was revoked yet."""
    with suppress(OSError, ValueError):
        return base64.b64decode(fileio.read_bytes(folder / _REVOKED_FILE))
    return b""


def keep_needs(folder: Path, needs: Sequence[str]) -> None:
    """Write what tokens say of what to install; see `invite`."""
    fileio.write(folder / NEEDS_FILE, "\n".join([*needs, ""]), folder)


def own_pass(key: invitations.Key, name: str, role: invitations.Role = "owner") -> Pass:
    """A pass for a peer of the owner's own, as far as a grant may hold its name; it is on no list."""
    short = terminal.name(name)[: terminal.LONGEST_NAME] or "peer"
    return invitations.grant(key, "own", short, role, time.time() + _FOR_EVER)


def owner_of(folder: Path) -> Owner:
    """The owner of the run in ``folder``.

    Raises UserError when there is no key, it can be read by others, or it is none.
    """
    file = folder / KEY_FILE
    if not file.exists():
        why = f"There is no {KEY_FILE} in {folder}: only the creator of a swarm has it."
        fix = "Name a run that `python -m jobs.swarm create` has made on this machine."
        raise UserError(f"{folder.name} was not created here.", why=why, fix=fix)
    try:
        fileio.require_private(file, "Whoever has that key decides who takes part in the run.")
        private = serialization.load_pem_private_key(fileio.read_bytes(file, follow=True), password=None)
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError("it is another kind of key")
        return Owner(folder, invitations.Key(private.private_bytes_raw()))
    except (OSError, ValueError, TypeError) as error:
        why = f"{getattr(error, 'strerror', None) or error}."
        fix = "Restore it from a copy; without it nobody can be invited any more."
        raise UserError(f"{file} is not the key of a run.", why=why, fix=fix) from None


def key_of(folder: Path) -> invitations.Key:
    """The key of a run that goes on; of one that begins, a new one, to be kept by `keep_key`.

    Raises UserError as `owner_of` does, and when the key is gone that has signed who is revoked.
    """
    if (folder / KEY_FILE).exists():
        return owner_of(folder).key
    if revoked_in(folder):
        why = f"Without it neither {folder / _REVOKED_FILE} nor any token that was given out is valid."
        fix = f"Restore it from a copy; or delete {_REVOKED_FILE} too, and invite everybody again."
        raise UserError(f"{folder / KEY_FILE} is missing.", why=why, fix=fix)
    return invitations.Key.generate()


def keep_key(folder: Path, key: invitations.Key) -> Owner:
    """Write the run's key into its folder, unless it is there already."""
    file = folder / KEY_FILE
    if not file.exists():
        kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pem = Ed25519PrivateKey.from_private_bytes(key.seed).private_bytes(*kind)
        fileio.write(file, pem, folder, private=True)
    return owner_of(folder)


def run_with(file: str, reference: str | None, env: Mapping[str, str], *, fix: str = "Name its folder") -> RunDir:
    """The run of that name or path, or the newest one here that has such a file of a swarm's.

    Raises UserError when there is none; ``fix`` is what to give instead.
    """
    if reference is not None:
        return find_run(reference, env)
    root = runs_root(env)
    swarms = [run for run in list_runs(root) if (run.path / file).is_file()]
    if swarms:
        return swarms[-1]
    fix = f"{fix}, or create one: python -m jobs.swarm create hivemind"
    raise UserError(f"No swarm in {root}.", why="None of the runs there has created one.", fix=fix)


def addresses_of(run: RunDir) -> tuple[str, ...]:
    """Return where the swarm of a run is, or was last, the best first.

    Raises UserError when it has not been anywhere yet.
    """
    known = place.addresses_in(run)
    if not known:
        fix = f"See how far it is: {terminal.command('logs', run.path)}"
        why = "Its swarm has not started, or it is not a swarm's run."
        raise UserError(f"{run.name} has no address yet.", why=why, fix=fix)
    saved = place.saved_peer(run)  # which knows its anchors
    return tuple(dict.fromkeys((*known, *(saved.others if saved else ()))))


def invite(
    owner: Owner, addresses: tuple[str, ...], name: str, seconds: float, role: invitations.Role,
    words: Sequence[str] = ("join",),
) -> list[str]:  # fmt: skip
    """Make a token; the lines that hold it, for the command of these words. They are for a terminal and for nothing
    that is kept."""
    made = owner.invite(name, role, seconds)
    may = "average for others and provide the weights" if role == "reducer" else "train"
    needs: list[str] = []
    with suppress(OSError, ValueError):  # a run of before, or changed by hand: nobody would take it
        text = fileio.read_text(owner.folder / NEEDS_FILE, LONGEST_FILE)
        needs = messages.NEEDS.validate_python(text.splitlines())
    until = invitations.date(made.grant.expires)
    token = invitations.write_token(made, addresses, needs)
    return [
        f"Until {until} {name} may {may}. Anybody with this line may, so treat it like a password:",
        # Not as an argument: everybody on a machine sees those of all processes.
        f"  {TOKEN_VARIABLE}={token} {terminal.command(*words)}",
    ]


def revoke(run: RunDir, name: str) -> str:
    """Revoke the invitations of that name, and tell the swarm; what to tell the user."""
    owner = owner_of(run.path)
    statement = owner.revoke(name)
    own = own_pass(owner.key, "revoke")
    try:
        processes.require_hivemind()
        from trainkit.swarm.network.dht import open_dht
        from trainkit.swarm.network.signed_records import identity

        with identity(None, own) as known, open_dht(known, peers=addresses_of(run)) as dht:
            dht.excluded.hear(REVOKED, statement)
            dht.publish_excluded(wait=True)
    except TrainkitError:
        return f"Revoked: {name}. The swarm cannot be reached from here; its creator applies it in the next round."
    return f"Revoked: {name}. The swarm knows."
