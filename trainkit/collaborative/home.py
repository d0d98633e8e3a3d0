"""What of a swarm lies in the run folder of a peer that others can reach, so that it comes back as the same one.

Its key and port are its address, which volunteers hold in their hands; the run's id and clock are what they go on by;
and whom else one can reach is remembered, because whoever comes back may find nobody but them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainkit import reading
from trainkit.collaborative import address
from trainkit.collaborative.address import ADDRESS_FILE
from trainkit.errors import UserError
from trainkit.records import files
from trainkit.records.rundir import RunDir
from trainkit.terminal import LONGEST_NAME

_FILE, _IDENTITY = "swarm.json", "swarm_identity"
# Of those that can be reached, so many are remembered.
MOST_OTHERS = 16


@dataclass(frozen=True)
class Home:
    """A peer's place in a swarm, beyond the life of its process."""

    run_id: str
    first_round: int
    host: str
    port: int
    announce: str | None = None
    """The address by which others know this machine, where that is not its own."""
    name: str = ""
    """What the others call it."""
    is_anchor: bool = False
    """It has joined, and does not answer for the run."""
    others: tuple[str, ...] = ()
    """Addresses of other peers that can be reached."""

    def write(self, run: RunDir) -> None:
        """Keep it. Raises OSError, and then what was kept before is as it was."""
        files.write(run.path / _FILE, json.dumps(asdict(self), indent=2) + "\n", run.path)


def home_of(run: RunDir) -> Home | None:
    """What `Home.write` has kept there; None if nothing.

    Raises UserError for a file that says something else.
    """
    if not (run.path / _FILE).exists():
        return None
    found = reading.read_object(run.path / _FILE)
    try:
        announce = found.get("announce")
        return Home(
            run_id=str(found["run_id"]),
            first_round=int(found["first_round"]),
            host=str(found["host"]),
            port=int(found["port"]),
            announce=str(announce) if announce else None,
            name=str(found.get("name") or "")[:LONGEST_NAME],
            is_anchor=found.get("is_anchor") is True,
            others=known_of(found.get("others") or ()),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{run.path / _FILE} does not say where the swarm was.",
            why=f"{type(error).__name__}: {error}.",
            fix="Restore it from a copy; or start a new swarm, whose volunteers must be told the new address.",
        ) from None


class Memory:
    """Whom a peer can turn to when it has lost the swarm, kept up to date; on the disk if it has a `Home` there."""

    def __init__(self, others: Sequence[str]) -> None:
        self.others = known_of(others)
        self._kept: tuple[RunDir, Home] | None = None

    def keep_in(self, run: RunDir, home: Home) -> None:
        """From now on also there."""
        self._kept = run, home
        self._write()

    def note(self, reachable: Sequence[str]) -> None:
        """These can be reached now. Those of before stay, for they may come back: the newest first."""
        others = known_of([*reachable, *self.others])
        if set(others) != set(self.others):
            self.others = others
            self._write()

    def _write(self) -> None:
        if self._kept is not None:
            run, home = self._kept
            with suppress(OSError):  # a full disk: what was known before is still there
                replace(home, others=self.others).write(run)


def known_of(addresses: Sequence[object]) -> tuple[str, ...]:
    """Those of ``addresses`` that are some, without repetition; they come from others, and become dialled."""
    good: dict[str, None] = {}
    for item in addresses:
        try:
            good[address.check(str(item))] = None
        except UserError:
            continue
    return tuple(good)[:MOST_OTHERS]


def identity_in(run: RunDir) -> Path:
    """The file of the peer's key."""
    return run.path / _IDENTITY


def keep_identity(run: RunDir, key: Path) -> None:
    """Copy the peer's key into its run folder, where only its user can read it."""
    file = identity_in(run)
    if file.exists() or file == key:
        return
    files.write(file, reading.read_bytes(key, follow=True), run.path, private=True)


def addresses_in(run: RunDir) -> tuple[str, ...]:
    """Where others have joined, by what `write_addresses` has kept; empty if nothing."""
    file = run.path / ADDRESS_FILE
    return known_of(reading.read_text(file).split()) if file.exists() else ()


def write_addresses(run_dir: RunDir, addresses: Sequence[str]) -> None:
    """Where others join, for whoever reads the run folder."""
    files.write(run_dir.path / ADDRESS_FILE, "".join(f"{item}\n" for item in addresses), run_dir.path)
