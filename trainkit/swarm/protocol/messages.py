"""Messages of the peers of a swarm: the manifest of the run, progress, credits, and words to the group."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any

import base58
import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from trainkit.common import terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.config.schema import CollaborativeConfig
from trainkit.run import code_files, run_manifest
from trainkit.run.contributions import typed_contributions
from trainkit.run.run_manifest import DISTRIBUTION, LONGEST_URL, PUBLIC_URL

PROTOCOL = 8
MANIFEST = "trainkit_manifest"
PROGRESS = "trainkit_progress"
CREDITS, REVOKED, BANNED = "trainkit_credits", "trainkit_revoked", "trainkit_banned"
"""Keys of the records in the DHT."""
MOST_PEERS = 1000
"""Most peers whose records a node keeps, and a reader reads, under one key."""
MOST_CREDITED = 200
CODE = "code of "
"""With what it is the code of: names of facts, see `facts_of`."""

ShortText = Annotated[str, Field(strict=True, max_length=128)]
Name = Annotated[ShortText, AfterValidator(lambda text: terminal.name(text) or "?")]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, le=1 << 50)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Value = Annotated[Number, Field(ge=-1e6, le=1e6)]


_BY_COMMIT = rf"{DISTRIBUTION} @ git\+{PUBLIC_URL}@[0-9a-f]{{40}}([0-9a-f]{{24}})?"
_BY_VERSION = rf"({DISTRIBUTION}|torch|torchvision|timm|hivemind)==[0-9][0-9a-z.]{{0,30}}(\.\*)?"
Requirement = Annotated[
    str, Field(strict=True, max_length=LONGEST_URL + 100, pattern=f"^({_BY_COMMIT}|{_BY_VERSION})$")
]
"""Requirement of what the run's creator has: trainkit at a commit of a public place, or a version."""
MOST_NEEDS = 8
NEEDS: TypeAdapter[list[Requirement]] = TypeAdapter(Annotated[list[Requirement], Field(max_length=MOST_NEEDS)])


@dataclass(frozen=True)
class Manifest:
    """Description of a run that all its peers have in common. No node keeps one whose fields are not of these types and
    bounds.

    Fields of later versions are passed over: who has another version than the creator reads at least which.
    """

    __pydantic_config__ = ConfigDict(extra="ignore")

    run_id: ShortText
    name: ShortText
    config: Annotated[str, Field(strict=True, max_length=100_000)]
    """The complete configuration as YAML."""
    first_round: Count
    owner: Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
    """The owner's public key, in hex."""
    # A peer that does not train builds its model by these three. Larger ones would fill its memory.
    num_classes: Annotated[int, Field(strict=True, ge=1, le=1 << 20)]
    in_chans: Annotated[int, Field(strict=True, ge=1, le=1024)]
    image_size: Annotated[int, Field(strict=True, ge=1, le=1 << 14)]
    facts: dict[Annotated[str, Field(strict=True)], Annotated[str, Field(strict=True, max_length=500)]] = field(
        default_factory=dict
    )
    """Facts that every peer must have alike, see `facts_of`."""
    trains: Flag = True
    """The creator trains, so that it can look at others' work, see `trainkit.swarm.trust.replay`."""
    stopped: Flag = False
    """The creator has ended the run before its last round."""
    protocol: Count = PROTOCOL
    since: Annotated[Number, Field(ge=0.0, le=1e11)] = 0.0
    """When its creator was started: of two with the same key the later one counts."""
    origin: Annotated[str, Field(strict=True, max_length=300)] = ""
    """Version of trainkit that the creator runs, as a person is told."""
    needs: Annotated[list[Requirement], Field(max_length=MOST_NEEDS)] = field(default_factory=list)
    """Requirements of what the creator has."""

    def runs(self) -> str:
        """A sentence that says which trainkit the creator has; empty if it does not."""
        return f" The creator runs {terminal.one_line(self.origin, 300)}." if self.origin else ""

    def way_to(self, different: Collection[str]) -> str:
        """Return what to type to have those facts as the creator has them; empty where nothing that is known would
        do.
        """
        kits = [item for item in self.needs if item.startswith(run_manifest.DISTRIBUTION)]
        libraries = {item: item.partition("==")[0] for item in self.needs if item not in kits}
        commands = []
        if kits and f"{CODE}trainkit" in different:
            url, _, commit = kits[0].partition(" @ git+")[2].rpartition("@")
            if url and (code_files.INSTALLED / ".git").exists():  # which Python finds before what pip installs
                git = f"git -C {terminal.word_for_shell(str(code_files.INSTALLED))}"
                commands.append(f"{git} fetch {url} {commit} && {git} checkout {commit}")
            else:  # another commit with the same version is none to pip
                commands.append(_pip("--force-reinstall", "--no-deps", kits[0]))
        if not set(different).isdisjoint(libraries.values()):  # all of them, for they go together
            commands.append(_pip(*libraries))
        return " && ".join(commands)


def _pip(*words: str) -> str:
    return f"python -m pip install {' '.join(map(terminal.word_for_shell, words))}"


@dataclass(frozen=True)
class PeerProgress:
    """Word of a peer about its last round. Nobody keeps one whose fields are not of these types and bounds."""

    name: Name
    """One line that a terminal may show."""
    round: Count
    samples: Count
    samples_per_sec: Annotated[Number, Field(ge=0.0, le=1e9)]
    loss: Value
    group: Annotated[Count, Field(le=100_000)]
    """Peers that averaged together, itself included; 0: it went on alone."""
    time: Annotated[Number, Field(ge=0.0, le=1e11)]
    tried: Flag = False
    """It has other libraries than the run, and counts once an audit has agreed."""
    client: Flag = False
    """It only calls out, as behind a router, and so neither reduces nor gives its state away."""
    parts: Count = 0
    """Parts of the average that reached it, of ``expected``."""
    expected: Count = 0
    sent: Count = 0
    """Bytes that it has sent for the round, and received."""
    received: Count = 0
    val_loss: Value | None = None
    """The last validation, of those who validate the common model."""
    val_headline: Value | None = None
    """And the metric that the task is judged by."""
    addresses: Annotated[Sequence[Annotated[str, Field(strict=True, max_length=200)]], Field(max_length=8)] = ()
    """Addresses at which others reach the peer; empty if they cannot."""
    signed: Annotated[bytes, Field(strict=True, max_length=2000)] = b""
    """Statement by somebody of the owner's side about the state that it has now."""


_STATEMENT: TypeAdapter[bytes] = TypeAdapter(Annotated[bytes, Field(strict=True)])
_CREDITS = Annotated[list[dict[str, Any]], Field(strict=True, max_length=MOST_CREDITED)]
SHAPES: dict[str, tuple[int, TypeAdapter[Any]]] = {
    MANIFEST: (1 << 17, TypeAdapter(Manifest)),
    PROGRESS: (1 << 13, TypeAdapter(PeerProgress)),
    CREDITS: (1 << 17, TypeAdapter(Annotated[_CREDITS, AfterValidator(typed_contributions)])),
    REVOKED: (1 << 16, _STATEMENT),
    BANNED: (1 << 16, _STATEMENT),
}
"""Key of a record -> bytes at most, and the type that its value must have."""


def records_in(key: str, found: Any) -> dict[str, Any]:
    """Peer id -> its record, of what the DHT returned for ``key``; its validators have checked signatures.

    Keys without a shape are of records that hold a peer's credential.
    """
    records: dict[str, Any] = {}
    _, shape = SHAPES.get(key, (0, _STATEMENT))
    if found is not None and isinstance(found.value, dict):
        for subkey, entry in islice(found.value.items(), MOST_PEERS):
            with suppress(ValueError, TypeError, AttributeError):
                records[base58.b58encode(subkey).decode()] = shape.validate_python(entry.value)
    return records


def manifest_of(found: Mapping[str, Manifest]) -> tuple[str, Manifest]:
    """The manifest of a swarm, of those that its owner has signed, and its creator's id: the creator that was started
    last counts.

    Raises RefusedError when it comes from another version of trainkit.
    """
    creator, manifest = max(found.items(), key=lambda item: item[1].since)
    if manifest.protocol != PROTOCOL:
        what = f"The swarm speaks version {manifest.protocol}, this trainkit version {PROTOCOL}."
        why = f"Its creator has another version of trainkit.{manifest.runs()}"
        fix = manifest.way_to([f"{CODE}trainkit"]) or "Install the creator's version."
        raise RefusedError(what, why=why, fix=fix)
    return creator, manifest


def require_going_on(manifest: Manifest, rounds: CollaborativeConfig | None = None) -> None:
    """Raises UserError when the creator has ended the run, or, by the time, all of its ``rounds`` are done."""
    why = "Its creator has ended it." if manifest.stopped else ""
    if rounds is not None:
        clock = RoundClock(rounds.round_seconds, manifest.first_round, rounds.rounds)
        if clock.index(time.time()) >= rounds.rounds:
            why = f"All of its {rounds.rounds} rounds are done."
    if why:
        raise UserError(f"The run {manifest.name} is over.", why=why, fix="Join another.")


def no_run_at(peer: str) -> UserError:
    """Nobody there has a manifest."""
    why = "A peer answers there, but it knows no trainkit run: the run has not started yet, or is over."
    fix = "Ask whoever runs `python -m jobs.swarm create` for the current address."
    return UserError(f"No run at {peer}.", why=why, fix=fix)


# What a peer tells its group before they average.

_LONGEST = 4096  # bytes; 1,200 are known today
NODE, CLIENT, AUX = 0, 1, 2
"""hivemind's ``AveragingMode``: averages for others and trains; only trains; only averages for others."""


class Gathered(BaseModel):
    """Words of a peer to its group, some of them for hivemind; fields of later versions are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    bandwidth: Annotated[float, Field(ge=0.0, le=1e12)] | None = None
    mode: Annotated[int, Field(ge=NODE, le=AUX)] = CLIENT
    rate: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """Samples per second in this round."""
    probe: Annotated[bytes, Field(max_length=1024)] = b""
    """Sums of the weights of a peer that gives its state away."""


NOTHING = Gathered()
"""Words of a peer that sends garbage: nothing is wanted of it."""


def read_gathered(data: bytes) -> Gathered | None:
    """Return what ``data`` says; None if it is not what a peer of ours sends.

    hivemind takes it as it comes: one peer that sends garbage would end every round for all.
    """
    if len(data) <= _LONGEST:
        with suppress(ValueError, TypeError):
            bandwidth, mode, about = plain_msgpack(data)
            return Gathered(bandwidth=bandwidth, mode=mode, **plain_msgpack(about))
    return None


def plain_msgpack(data: bytes) -> Any:
    """MessagePack's plain types only: hivemind's serializer also makes objects of its own from it. None for garbage."""
    with suppress(ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
    return None


# Points per epoch of the schedule at which the learning rate is set.
_GRID = 1000


@dataclass(frozen=True)
class RoundClock:
    """``count`` rounds of ``seconds``; ``first`` is the number of round 0, counted since 1970.

    Round ``r`` ends at ``(first + r + 1) * seconds`` on the clock that the peers share. So every peer knows which round
    it is without asking; nobody waits for the slowest, and no message of a peer moves the others' clock.
    """

    seconds: float
    first: int
    count: int

    @classmethod
    def starting(cls, now: float, seconds: float, count: int, *, done: int = 0) -> RoundClock:
        """A clock whose round ``done`` is under way at ``now``.

        It ends at the boundary after the next one, so that it lasts at least ``seconds``: the first peers are starting.
        """
        return cls(seconds, math.floor(now / seconds) + 1 - done, count)

    def index(self, now: float) -> int:
        """The round under way; ``count`` when the run is over. Time before round 0 belongs to round 0."""
        return min(max(0, math.floor(now / self.seconds) - self.first), self.count)

    def boundary(self, index: int) -> float:
        """When round ``index`` ends."""
        return (self.first + index + 1) * self.seconds

    @property
    def end(self) -> float:
        """When the last round ends."""
        return self.boundary(self.count - 1)

    def grid(self, now: float, epochs: int) -> tuple[int, int, int]:
        """``(step, steps_per_epoch, total_steps)`` for `trainkit.training.schedule.lr_at`.

        The schedule of ``train.epochs`` is stretched over the rounds: all peers have the same learning rate at the same
        moment, however many updates each of them makes.
        """
        total = epochs * _GRID
        done = max(0.0, (now / self.seconds - self.first) / self.count)
        return min(int(done * total), total - 1), _GRID, total
