"""Presets, files, overrides and flags -> one frozen `Config` that remembers where each value came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pydantic import ValidationError

from trainkit.config import yaml
from trainkit.config.launch import ALWAYS_WRITTEN, is_one_line
from trainkit.config.layers import DEFAULT, OPEN_MAPPINGS, Layer, Source, merge, moved, override_layer
from trainkit.config.presets import file_layer, find_preset, profile_layer
from trainkit.config.schema import SECTIONS, Config
from trainkit.config.slurm_options import long_name, settings_of
from trainkit.errors import TrainkitError, UserError

CLUSTER = "TRAINKIT_CLUSTER"
"""Names the site's profile."""


@dataclass(frozen=True)
class Loaded:
    """A configuration, the preset's name, and the source of every key that is not a default."""

    config: Config
    name: str
    sources: Mapping[str, Source]
    """Of ``launch.sbatch`` and ``launch.srun`` also that of each entry."""
    notes: tuple[str, ...] = ()
    """On what of the environment is not passed on."""

    def source(self, key: str) -> Source:
        """Source of a dotted key, ``DEFAULT`` when nobody set it."""
        return self.sources.get(key, DEFAULT)

    @contextmanager
    def pointing_at_sources(self) -> Iterator[None]:
        """Errors of checks made inside also say where their ``key`` was written."""
        try:
            yield
        except TrainkitError as error:
            source = self.sources.get(error.key or "")
            if source is None or str(source) in str(error):
                raise
            why = f"{error.why.removesuffix('.')} " if error.why else "Written there "
            raise type(error)(error.what, why=f"{why}({source}).", fix=error.fix, key=error.key) from error.__cause__


def load(
    preset: str,
    overrides: Iterable[str] = (),
    *,
    flags: Mapping[str, tuple[Any, str]] | None = None,
    env: Mapping[str, str] | None = None,
    moved_to: str | None = None,
) -> Loaded:
    """The configuration of ``preset`` with everything that outranks it.

    Precedence, highest first: flags and overrides, environment, file, cluster profile, default.

    Args:
        preset: a name in ``configs/``, or the path of a YAML file or of a run folder.
        overrides: ``section.key=value``.
        flags: dotted key -> (value, the flag as it was written).
        env: the environment; only sbatch's own variables and `CLUSTER` count.
        moved_to: the profile of another site than that for which a run's configuration was made.

    Raises:
        UserError: unknown preset or key, wrong type, impossible combination; names the key and where it was written.
    """
    path = find_preset(preset)
    from_file = file_layer(path, ())
    if moved_to is not None:
        from_file = _moved(from_file, moved_to)
    given = env or {}
    variables, notes = settings_of(given)
    variables += [(CLUSTER, "launch.cluster", given[CLUSTER])] if given.get(CLUSTER) else []
    layers: list[Layer] = [{key: (value, Source("environment", name))} for name, key, value in variables]
    layers += [override_layer(overrides)]
    layers += [{key: (value, Source("flag", flag)) for key, (value, flag) in (flags or {}).items()}]
    layers.insert(0, from_file)
    merged = reduce(merge, layers)
    cluster, written = merged.get("launch.cluster", (None, DEFAULT))
    # The configuration that a run keeps is complete: what its site's profile says by now, or whether it is still there,
    # must not matter.
    complete = all(f"launch.{name}" in from_file for name in ALWAYS_WRITTEN) and written.kind == "file"
    if cluster is not None and not complete:
        layers.insert(0, profile_layer(str(cluster)))
        merged = merge(layers[0], merged)
    name = path.parent.name.rsplit("-", 1)[0] if path.name == "config.yaml" else path.stem
    if not is_one_line(name):
        raise UserError(
            f"{name!r} cannot name a run.",
            why="It holds a line break or another control character.",
            fix="Rename the file or the folder.",
        )
    sources = {key: source for key, (_, source) in merged.items()} | _entries(layers)
    return Loaded(_validate(merged), name, sources, tuple(notes))


def _entries(layers: Iterable[Layer]) -> dict[str, Source]:
    """The source of each entry of the mappings that are merged; ``layers``: from the lowest to the highest."""
    return {
        f"{mapping}.{long_name(mapping.removeprefix('launch.'), str(name))}": source
        for layer in layers
        for mapping in OPEN_MAPPINGS
        if mapping in layer
        for value, source in [layer[mapping]]
        if isinstance(value, dict)
        for name in value
    }


def _moved(layer: Layer, cluster: str) -> Layer:
    before, _ = layer.get("launch.cluster", (None, DEFAULT))
    said: Layer = {}
    if before is not None:
        with suppress(UserError):  # that profile may be gone: then nobody knows what it has said
            said = profile_layer(str(before))
    there = merge(profile_layer(cluster), {"launch.cluster": (cluster, Source("flag", "--cluster"))})
    return moved(layer, said, there)


def to_yaml(config: Config) -> str:
    """The complete configuration as YAML; loading it gives an equal `Config`."""
    return yaml.dump(config.model_dump(mode="json"))


def _validate(layer: Layer) -> Config:
    tree: dict[str, Any] = {}
    for key, (value, source) in layer.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                from trainkit.config import mistakes

                if parent in SECTIONS and node is tree:
                    raise mistakes.value_for_section(parent, child, layer[parent][1])
                raise mistakes.below_a_value(key, layer)
            node = child
        if last in SECTIONS and node is tree:
            from trainkit.config import mistakes

            raise mistakes.value_for_section(last, value, source)
        node[last] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        from trainkit.config import mistakes  # what only a mistake needs

        raise mistakes.explain(error, layer) from None
