"""What the peers of a swarm tell one another: the manifest, and what a machine makes of the settings in it; progress,
credits, words to the group, and the clock.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import base58
import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from trainkit import fileio, plugins, terminal
from trainkit.config.checks import check_strategy, strategy_traits
from trainkit.config.loading import Loaded, flatten, load
from trainkit.config.schema import SECTIONS, CollaborativeConfig, Config, reach
from trainkit.data.base import DataInfo, Splits
from trainkit.errors import RefusedError, UserError
from trainkit.run import snapshot
from trainkit.run.metrics import typed_contributions
from trainkit.swarm.invitations import MOST_NEEDS, Requirement

PROTOCOL = 8
MANIFEST, PROGRESS = "trainkit_manifest", "trainkit_progress"
CREDITS, REVOKED, BANNED = "trainkit_credits", "trainkit_revoked", "trainkit_banned"
"""Keys of the records in the DHT."""
MOST_PEERS = 1000
"""Most peers whose records a node keeps, and a reader reads, under one key."""
MOST_CREDITED = 200
CODE = "code of "
"""With what it is the code of: names of facts, see `facts_of`."""

Text = Annotated[str, Field(strict=True, max_length=128)]
Name = Annotated[Text, AfterValidator(lambda text: terminal.name(text) or "?")]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, le=1 << 50)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Value = Annotated[Number, Field(ge=-1e6, le=1e6)]


@dataclass(frozen=True)
class Manifest:
    """What all peers of a run have in common. No node keeps one whose fields are not of these types and bounds.

    Fields of later versions are passed over: who has another version than the creator reads at least which.
    """

    __pydantic_config__ = ConfigDict(extra="ignore")

    run_id: Text
    name: Text
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
    """What every peer must have alike, see `facts_of`."""
    trains: Flag = True
    """The creator trains, so that it can look at others' work, see `trainkit.swarm.replay`."""
    stopped: Flag = False
    """The creator has ended the run before its last round."""
    protocol: Count = PROTOCOL
    since: Annotated[Number, Field(ge=0.0, le=1e11)] = 0.0
    """When its creator was started: of two with the same key the later one counts."""
    origin: Annotated[str, Field(strict=True, max_length=300)] = ""
    """Which trainkit the creator runs, as a person is told."""
    needs: Annotated[list[Requirement], Field(max_length=MOST_NEEDS)] = field(default_factory=list)
    """What pip installs of what the creator has."""
    code: Annotated[str, Field(strict=True, pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the archive of code that the creator gives away; empty if it gives none."""

    def runs(self) -> str:
        """A sentence that says which trainkit the creator has; empty if it does not."""
        return f" The creator runs {terminal.one_line(self.origin, 300)}." if self.origin else ""

    def way_to(self, different: Collection[str]) -> str:
        """What to type to have those facts as the creator has them; empty where nothing that is known would do."""
        kits = [item for item in self.needs if item.startswith(snapshot.DISTRIBUTION)]
        libraries = {item: item.partition("==")[0] for item in self.needs if item not in kits}
        here, commands = snapshot.INSTALLED, []
        if kits and f"{CODE}trainkit" in different:
            url, _, commit = kits[0].partition(" @ git+")[2].rpartition("@")
            if url and (here / ".git").exists():  # which Python finds before what pip installs
                git = f"git -C {terminal.word_for_shell(str(here))}"
                commands.append(f"{git} fetch {url} {commit} && {git} checkout {commit}")
            else:  # another commit with the same version is none to pip
                commands.append(_pip("--force-reinstall", "--no-deps", kits[0]))
        if not set(different).isdisjoint(libraries.values()):  # all of them, for they go together
            commands.append(_pip(*libraries))
        ways = [" && ".join(commands)] if commands else []
        if self.code and any(key.startswith(CODE) for key in different):
            ways.append(f"{terminal.command('join', '--code')} (takes the creator's own code, and shows it first)")
        return "; or ".join(ways)


def _pip(*words: str) -> str:
    return f"python -m pip install {' '.join(map(terminal.word_for_shell, words))}"


@dataclass(frozen=True)
class PeerProgress:
    """What a peer says about its last round. Nobody keeps one whose fields are not of these types and bounds."""

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
    """Where others reach the peer; empty if they cannot."""
    signed: Annotated[bytes, Field(strict=True, max_length=2000)] = b""
    """What somebody of the owner's side says of the state that it has now."""


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


def manifest_of(found: Mapping[str, Manifest], *, any_version: bool = False) -> tuple[str, Manifest]:
    """The manifest of a swarm, of those that its owner has signed, and its creator's id: the creator that was started
    last counts.

    Raises RefusedError when it comes from another version of trainkit, unless ``any_version`` will do.
    """
    creator, manifest = max(found.items(), key=lambda item: item[1].since)
    if manifest.protocol != PROTOCOL and not any_version:
        raise RefusedError(
            f"The swarm speaks version {manifest.protocol}, this trainkit version {PROTOCOL}.",
            why=f"Its creator has another trainkit.{manifest.runs()}",
            fix=manifest.way_to([f"{CODE}trainkit"]) or "Install the creator's version.",
        )
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
    return UserError(
        f"No run at {peer}.",
        why="A peer answers there, but it knows of no trainkit run: not started yet, or over.",
        fix="Ask whoever runs `python -m jobs.swarm create` for the present address.",
    )


# A joining peer decides these for itself; everything else is the run's.
_OF_A_MACHINE = ("data.root", "data.workers", "train.micro_batch_size", "train.precision", "launch.gpus_per_node")
OWN_KEYS = (*_OF_A_MACHINE, "monitor.")
_NOT_COMMON = (*OWN_KEYS, "launch.", "checkpoint.", "collaborative.initial_peers", "collaborative.port")


def require_collaborative(config: Config) -> None:
    """Refuse a configuration that cannot be trained by a swarm. Raises UserError."""
    if strategy_traits(config.strategy.name).loop != "collaborative":
        raise UserError(
            f"strategy.name={config.strategy.name} is no collaborative run.",
            why="Peers of a swarm train with strategy.name=hivemind.",
            fix="Use the preset hivemind, or add strategy.name=hivemind.",
        )
    plugins.check_options("trainkit.strategies", config.strategy.name, config.strategy.options, where="strategy")
    check_strategy(config)


def check_own(overrides: Sequence[str]) -> None:
    """Refuse overrides of what all peers must have in common. Raises UserError."""
    for text in overrides:
        key = text.partition("=")[0]
        if not key.startswith(OWN_KEYS):
            raise UserError(
                f"'{key}' cannot be set by a peer that joins.",
                why="It comes from the run's creator, for all peers alike.",
                fix=f"Yours are: {', '.join(own + '*' if own.endswith('.') else own for own in OWN_KEYS)}.",
            )


def load_text(text: str, overrides: Sequence[str] = (), **layers: Any) -> Loaded:
    """As `trainkit.config.loading.load`, of a configuration that somebody has sent."""
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        file = Path(folder) / "hivemind-peer.yaml"  # a run is named after it
        fileio.write(file, text)
        return load(str(file), overrides, **layers)


def adapted(config_yaml: str, overrides: Sequence[str], *, allow_code: bool) -> Config:
    """The manifest's configuration for this machine, with data and resources of its own.

    What the creator starts, and where they send something, is left out: a peer has places of its own, or none.

    Raises UserError when it needs code of the creator's own and that is not allowed.
    """
    # The creator's folder and machine are not this one's.
    own = ["data.root=data", "data.workers=auto", "launch.gpus_per_node=auto", *overrides]
    config = load_text(config_yaml, own).config
    given = {text.partition("=")[0] for text in overrides}
    for key, value in flatten(config.model_dump(mode="json")):
        if reach(key, value).does == "imports" and key not in given and not allow_code:
            raise UserError(
                f"The run uses code of its creator's own: {key}={value}.",
                why="Joining would run that function on this machine.",
                fix="If you have that code and trust it, add --allow-code.",
            )
    sections = {}
    for name in SECTIONS.keys() - {"collaborative"}:
        section = getattr(config, name)
        values = {
            key: info.get_default(call_default_factory=True)
            for key, info in SECTIONS[name].model_fields.items()
            if f"{name}.{key}" not in given
            and reach(f"{name}.{key}", getattr(section, key)).does in ("starts", "sends")
        }
        sections[name] = section.model_copy(update=values)
    config = config.model_copy(update=sections)
    require_collaborative(config)
    return config


def same_settings(config: Config, manifest_yaml: str) -> Config:
    """``config``, if it says about the run what the manifest says.

    Raises UserError that names the first key in which they differ.
    """
    theirs = dict(flatten(adapted(manifest_yaml, (), allow_code=True).model_dump(mode="json")))
    ours = dict(flatten(config.model_dump(mode="json")))
    for key in sorted(ours.keys() | theirs.keys()):
        if not key.startswith(_NOT_COMMON) and ours.get(key) != theirs.get(key):
            raise UserError(
                f"{key} is {ours.get(key)} here and {theirs.get(key)} in the swarm.",
                why="All peers of a run have the same settings.",
                fix=f"Submit with {key}={theirs.get(key)}.",
            )
    return config


# What a peer tells its group before they average.

_LONGEST = 4096  # bytes; 1,200 are known today
NODE, CLIENT, AUX = 0, 1, 2
"""hivemind's ``AveragingMode``: averages for others and trains; only trains; only averages for others."""


class Gathered(BaseModel):
    """What hivemind needs of a peer, and what the peer says; fields of later versions are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    bandwidth: Annotated[float, Field(ge=0.0, le=1e12)] | None = None
    mode: Annotated[int, Field(ge=NODE, le=AUX)] = CLIENT
    rate: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """Samples per second in this round."""
    probe: Annotated[bytes, Field(max_length=1024)] = b""
    """Of the weights of a peer that gives its state away."""


NOTHING = Gathered()
"""Of a peer that sends garbage: nothing is wanted of it."""


def read_gathered(data: bytes) -> Gathered | None:
    """What ``data`` says; None if it is not what a peer of ours sends.

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


def _untouched(image: Any) -> Any:
    raise AssertionError("an anchor has no images")


def no_data(name: str, manifest: Manifest) -> Splits:
    """The run's data set ``name`` without a sample, for a peer that does not train.

    Class names are numbers and means are zero: an anchor takes its weights from the run, so they decide about nothing.
    Where they decide about shapes nonetheless, the model is refused as another one.
    """
    info = DataInfo(
        name=name,
        num_classes=manifest.num_classes,
        in_chans=manifest.in_chans,
        image_size=manifest.image_size,
        class_names=tuple(map(str, range(manifest.num_classes))),
        mean=(0.0,) * manifest.in_chans,
        std=(1.0,) * manifest.in_chans,
    )
    return Splits(info, (), (), (), _untouched, _untouched, in_memory=True)


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
        """``(step, steps_per_epoch, total_steps)`` for `trainkit.training.optim.lr_at`.

        The schedule of ``train.epochs`` is stretched over the rounds: all peers have the same learning rate at the same
        moment, however many updates each of them makes.
        """
        total = epochs * _GRID
        done = max(0.0, (now / self.seconds - self.first) / self.count)
        return min(int(done * total), total - 1), _GRID, total
