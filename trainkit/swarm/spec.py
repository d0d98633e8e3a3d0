"""One peer as it is asked for: its place, what it calls while it works, and its configuration.

Most settings are the run's, and the same for all peers; some are for a peer's own machine.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit import fileio, plugins
from trainkit.accelerators import MASKS
from trainkit.config.checks import check_strategy, strategy_traits
from trainkit.config.loading import Loaded, flatten, load
from trainkit.config.schema import SECTIONS, Config, reach
from trainkit.errors import UserError
from trainkit.ranks import NO_SECRET, RankEnv, Secret
from trainkit.run.events import Writer
from trainkit.run.folder import RunDir

PATIENCE_SECONDS = 24 * 3600.0
"""How long a peer waits for a swarm that does not answer any more."""
# A joining peer decides these for itself; everything else is the run's.
_OF_A_MACHINE = ("data.root", "data.workers", "train.micro_batch_size", "train.precision", "launch.gpus_per_node")
OWN_KEYS = (*_OF_A_MACHINE, "monitor.")
_NOT_COMMON = (*OWN_KEYS, "launch.", "checkpoint.", "collaborative.initial_peers", "collaborative.port")


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
    """What a peer calls while it works."""

    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    open_run: Callable[[Config, str], Writer] | None = None
    """Makes or opens the run folder of a peer that joins the run of this name (empty for its creator), and takes its
    lease; None for a rank whose rank 0 keeps the records."""
    beat: Callable[[], None] = lambda: None
    """Called whenever this peer has made progress."""
    step: Callable[[str], None] = lambda what: None
    """Called with what this peer is to do next, until it trains; empty: there is nothing to wait for any more."""


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


def check_peer(config: Config, spec: PeerSpec) -> None:
    """Refuse a peer that cannot take part in the way of the run. Raises UserError."""
    if config.collaborative.sync != "gradients":
        return
    if spec.max_upload is not None:
        raise UserError(
            "--max-upload does not go with collaborative.sync=gradients.",
            why="All gradients of all peers are sent for every update: there is nothing to send later.",
            fix="Leave it out; or have a run with collaborative.sync=diloco, which sends far less.",
        )
    if spec.team and spec.env.world_size > 1:
        raise UserError(
            f"A peer of {spec.env.world_size} ranks cannot take part with collaborative.sync=gradients.",
            why="There every rank gathers gradients for itself.",
            fix=f"Start one peer for each GPU, and leave it that one alone ({MASKS[0]}); all may use the same token.",
        )


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
