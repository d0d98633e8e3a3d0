"""Whose settings count: the run's, which all peers have in common, and those that a peer has for its own machine."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trainkit import fileio, plugins
from trainkit.config.checks import check_strategy, strategy_traits
from trainkit.config.loading import flatten, load
from trainkit.config.schema import SECTIONS, Config, reach
from trainkit.errors import UserError

# What a joining peer decides for itself; everything else is the run's.
OWN_KEYS = (
    "data.root",
    "data.workers",
    "train.micro_batch_size",
    "train.precision",
    "launch.gpus_per_node",
    "monitor.",
)
_NOT_COMMON = (
    *OWN_KEYS,
    "launch.",
    "checkpoint.",
    "collaborative.initial_peers",
    "collaborative.port",
)


def require_collaborative(config: Config) -> None:
    """Refuse a configuration that cannot be trained by a swarm.

    Raises UserError.
    """
    if strategy_traits(config.strategy.name).loop != "collaborative":
        raise UserError(
            f"strategy.name={config.strategy.name} is no collaborative run.",
            why="Peers of a swarm train with strategy.name=hivemind.",
            fix="Use the preset hivemind, or add strategy.name=hivemind.",
        )
    plugins.check_options("trainkit.strategies", config.strategy.name, config.strategy.options, where="strategy")
    check_strategy(config)


def check_peer(config: Config, *, ranks: int, max_upload: float | None) -> None:
    """Refuse a peer that cannot take part in the way of the run.

    Args:
        ranks: of this peer.
        max_upload: what it may send, in bytes per second; None: as much as it can.

    Raises UserError.
    """
    if config.collaborative.sync != "gradients":
        return
    if max_upload is not None:
        raise UserError(
            "--max-upload does not go with collaborative.sync=gradients.",
            why="All gradients of all peers are sent for every update: there is nothing to send later.",
            fix="Leave it out; or have a run with collaborative.sync=diloco, which sends far less.",
        )
    if ranks > 1:
        raise UserError(
            f"A peer of {ranks} ranks cannot take part with collaborative.sync=gradients.",
            why="There every rank gathers gradients for itself.",
            fix="Start one peer for each GPU, with CUDA_VISIBLE_DEVICES; all may use the same token.",
        )


def check_own(overrides: Sequence[str]) -> None:
    """Refuse overrides of what all peers must have in common.

    Raises UserError.
    """
    for text in overrides:
        key = text.partition("=")[0]
        if not any(key == own or (own.endswith(".") and key.startswith(own)) for own in OWN_KEYS):
            raise UserError(
                f"'{key}' cannot be set by a peer that joins.",
                why="It comes from the run's creator, for all peers alike.",
                fix=f"Yours are: {', '.join(own + '*' if own.endswith('.') else own for own in OWN_KEYS)}.",
            )


def adapted(config_yaml: str, overrides: Sequence[str], *, allow_code: bool) -> Config:
    """The manifest's configuration for this machine: data and resources are its own.

    Raises UserError when it needs code of the creator's own and that is not allowed.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        file = Path(folder) / "manifest.yaml"
        fileio.write(file, config_yaml)
        # The creator's folder and machine are not this one's.
        own = ["data.root=data", "data.workers=auto", "launch.gpus_per_node=auto", *overrides]
        config = load(str(file), own).config
    given = {text.partition("=")[0] for text in overrides}
    for key, value in flatten(config.model_dump(mode="json")):
        if reach(key, value).does == "imports" and key not in given and not allow_code:
            raise UserError(
                f"The run uses code of its creator's own: {key}={value}.",
                why="Joining would run that function on this machine.",
                fix="If you have that code and trust it, add --allow-code.",
            )
    config = _without_places(config, keep=given)
    require_collaborative(config)
    return config


def _without_places(config: Config, keep: Collection[str]) -> Config:
    """Without what the creator starts, and where they send something: a peer has places of its own, or none."""
    sections = {}
    for name, section in SECTIONS.items():
        values = {
            field: info.get_default(call_default_factory=True)
            for field, info in section.model_fields.items()
            if (key := f"{name}.{field}") not in keep and name != "collaborative"
            if reach(key, getattr(getattr(config, name), field)).does in ("starts", "sends")
        }
        sections[name] = getattr(config, name).model_copy(update=values)
    return config.model_copy(update=sections)


def same_settings(config: Config, manifest_yaml: str) -> Config:
    """``config``, if it says about the run what the manifest says.

    Raises UserError that names the first key in which they differ.
    """
    theirs = _flat(adapted(manifest_yaml, (), allow_code=True).model_dump(mode="json"))
    ours = _flat(config.model_dump(mode="json"))
    for key in sorted(ours.keys() | theirs.keys()):
        if not key.startswith(_NOT_COMMON) and ours.get(key) != theirs.get(key):
            raise UserError(
                f"{key} is {ours.get(key)} here and {theirs.get(key)} in the swarm.",
                why="All peers of a run have the same settings.",
                fix=f"Submit with {key}={theirs.get(key)}.",
            )
    return config


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
