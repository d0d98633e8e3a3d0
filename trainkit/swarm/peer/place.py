"""A peer's own place in a swarm: as it is asked for, and as its run folder keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trainkit.cluster.ranks import NO_SECRET, RankEnv, Secret
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.config.schema import Config
from trainkit.run.events import Attempt
from trainkit.run.folder import SWARM, SWARM_ADDRESS, SWARM_IDENTITY, RunDir
from trainkit.swarm.protocol.addresses import known_of

PATIENCE_SECONDS = 24 * 3600.0
"""Seconds that a peer waits for a swarm that does not answer any more."""


@dataclass(frozen=True)
class PeerSpec:
    """One peer's place: who it is, how others reach it, and whether it trains."""

    name: str
    env: RankEnv = field(default_factory=RankEnv.single)
    host: str | None = None
    """Address to listen on; None: call out only."""
    port: int = 0
    announce: str | None = None
    """The address that others are told, where it is not this machine's own."""
    is_carried: bool = False
    """A creator behind a router: that address is the port of an anchor, which lets others through to it."""
    carries: int = 0
    """Port at which an anchor lets others through to such a creator; 0: to none."""
    identity: Path | None = None
    folder: RunDir | None = None
    """The run folder, if there is one already: what it says of the swarm counts."""
    trains: bool = True
    """Else it only reduces, keeps the common weights and gives them away."""
    max_upload: float | None = None
    """Bytes per second that this peer may send at most; None: no limit."""
    patience: float = PATIENCE_SECONDS
    """Seconds to wait for a swarm that does not answer any more."""
    goes_on_later: bool = False
    """A stopped run will be started again from its last checkpoint, so it has no results yet."""
    team: bool = False
    """All ranks of ``env`` are this one peer, and this is rank 0, whom others may not reach though it listens; else
    every rank is a peer of its own, whom the job's network reaches."""
    secret: Secret = NO_SECRET
    """Known to the ranks and nobody else."""


@dataclass(frozen=True)
class Hooks:
    """Functions that a peer calls while it works."""

    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    open_run: Callable[[Config, str], Attempt] | None = None
    """Makes or opens the run folder of a peer that joins the run of this name (empty for its creator), and takes its
    lease; None for a rank whose rank 0 keeps the records."""
    beat: Callable[[], None] = lambda: None
    """Called whenever this peer has made progress."""
    step: Callable[[str], None] = lambda what: None
    """Called with what this peer is to do next, until it trains; empty: there is nothing to wait for any more."""


# What a peer that others can reach keeps in its run folder, so that it comes back as the same one.

ADDRESS_FILE = SWARM_ADDRESS.name
"""Addresses of a running swarm, one a line."""


@dataclass(frozen=True)
class SavedPeer:
    """A peer's place in a swarm, beyond the life of its process.

    Key and port are its address, which volunteers hold in their hands; the run's id and clock are what they go on by;
    and whoever comes back may find nobody but the others that it remembers.
    """

    run_id: str
    first_round: int
    host: str
    port: int
    announce: str | None = None
    """The address by which others know this machine, where that is not its own."""
    name: str = ""
    """Name by which the others call it."""
    others: tuple[str, ...] = ()
    """Addresses of other peers that can be reached."""
    is_carried: bool = False
    """See `PeerSpec.is_carried`."""

    def write(self, run: RunDir) -> None:
        """Keep it. Raises OSError, and then what was kept before is as it was."""
        fileio.write(SWARM.at(run.path), json.dumps(asdict(self), indent=2) + "\n", run.path)


_SAVED = TypeAdapter(SavedPeer)


def saved_peer(run: RunDir) -> SavedPeer | None:
    """Return what `SavedPeer.write` has kept there; None if nothing.

    Raises UserError for a file that says something else.
    """
    file = SWARM.at(run.path)
    if not file.exists():
        return None
    try:
        found = _SAVED.validate_python(fileio.read_object(file))
    except ValidationError as error:
        wrong = error.errors()[0]
        why = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}."
        fix = "Restore it from a copy; or start a new swarm, whose volunteers must be told the new address."
        raise UserError(f"{file} does not say where the swarm was.", why=why, fix=fix) from None
    return replace(found, name=found.name[: terminal.LONGEST_NAME], others=known_of(found.others))


def keep_identity(run: RunDir, content: bytes) -> None:
    """Keep the peer's key in its run folder, where only its user can read it."""
    file = SWARM_IDENTITY.at(run.path)
    if not file.exists():
        fileio.write(file, content, run.path, private=True)


def addresses_in(run: RunDir) -> tuple[str, ...]:
    """Return where others have joined, by what `write_addresses` has kept; empty if nothing."""
    file = run.path / ADDRESS_FILE
    return known_of(fileio.read_text(file).split()) if file.exists() else ()


def write_addresses(run_dir: RunDir, addresses: Sequence[str]) -> None:
    """Keep where others join, for whoever reads the run folder."""
    fileio.write(run_dir.path / ADDRESS_FILE, "\n".join([*addresses, ""]), run_dir.path)
