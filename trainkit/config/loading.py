"""Load a configuration from its layers."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainkit.common.errors import TrainkitError, UserError
from trainkit.config import yaml
from trainkit.config.checks import check_combinations
from trainkit.config.layers import DEFAULT, OPEN_MAPPINGS, Layer, explained, flatten, merge, override_layer
from trainkit.config.older import in_todays_words
from trainkit.config.presets import PACKAGED, find_preset, find_profile
from trainkit.config.schema import SECTIONS, Config, ImpossibleError, field_of, is_one_line
from trainkit.config.slurm_options import settings_of
from trainkit.config.source import Source

SITE = "site"
"""The section of a profile that holds what is known of the site."""


def file_layer(path: Path) -> Layer:
    """Return the layer of a preset's file, on top of those that it extends."""
    layer: Layer = {}
    for file, values, lines in reversed(_chain(path)):
        layer = merge(layer, _layer_of_file(file, values, lines, "file"))
    return layer


def files_of(path: Path) -> list[Path]:
    """A preset's file, and those that it extends, nearest first."""
    return [file for file, _, _ in _chain(path)]


def _chain(path: Path) -> list[tuple[Path, dict[str, Any], dict[str, int]]]:
    """A preset's file and those that it extends, nearest first, each with its values and their lines."""
    found = []
    seen = [path]
    while True:
        values, lines = yaml.read(seen[-1])
        parent = values.pop("extends", None)
        found.append((seen[-1], values, lines))
        if parent is None:
            return found
        file = _parent(seen[-1], parent, lines["extends"])
        is_seen = file.resolve() in map(Path.resolve, seen)
        seen.append(file)
        if is_seen:
            why = " -> ".join(map(str, seen))
            raise UserError(f"{file} extends itself.", why=why, fix="Remove one extends: of the circle.")


def _layer_of_file(path: Path, values: Mapping[str, Any], lines: Mapping[str, int], kind: str) -> Layer:
    """The layer of one file. `optim:` with nothing but comments below it says nothing."""
    layer: Layer = {}
    for key, value in flatten(values):
        if value is not None or key not in SECTIONS:
            layer[key] = (value, Source(kind, f"{path}:{lines.get(key, 1)}"))
    return layer


def _parent(path: Path, parent: Any, line: int) -> Path:
    """The file that ``path`` extends: beside it first, then as `find_preset` knows it.

    A preset that extends its own name extends the packaged one that it hides.
    """
    if not isinstance(parent, str):
        what = f"extends={parent} is not valid (file {path}:{line})."
        why = "It must be the name of one preset."
        raise UserError(what, why=why, fix="For example extends: ddp.")
    name = parent if parent.endswith((".yaml", ".yml")) else f"{parent}.yaml"
    beside = path.parent / name
    if os.path.isfile(beside):  # False for a name that no file can have
        if beside.resolve() == path.resolve() and (PACKAGED / name).is_file():
            return PACKAGED / name
        return beside
    try:
        return find_preset(parent)
    except UserError as error:
        raise UserError(error.what, why=f"{error.why.removesuffix('.')} (file {path}:{line}).", fix=error.fix) from None


def profile_layer(cluster: str) -> Layer:
    """Return the launch settings of the site profile of that name, or in that file.

    What it knows of the site itself, below ``site:``, is no setting (`trainkit.cluster.site`).
    """
    path = find_profile(cluster)
    values, lines = yaml.read(path)
    values.pop(SITE, None)
    layer = _layer_of_file(path, values, lines, "cluster profile")
    for key in layer:
        if not key.startswith("launch.") or key == "launch.cluster":
            why = f"{path}:{lines.get(key, 1)}; a profile describes a site, so it holds launch.* only."
            raise UserError(f"'{key}' does not belong in a cluster profile.", why=why, fix="Move it to a preset.")
    return layer


_IN_EVERY_RUN = {
    f"launch.{name}"
    for name in ("account", "exclude", "gpus_per_node", "mem", "nodes", "partition", "qos", "setup", "srun", "time")
}
"""Settings that every version has written into a run's configuration, if only as null. A file that lacks one of them is
a preset, whatever its name: it gets that from its site's profile."""
CLUSTER = "TRAINKIT_CLUSTER"
"""Names the site's profile."""


@dataclass(frozen=True)
class Loaded:
    """A configuration, the preset's name, and the source of every key that is not a default."""

    config: Config
    name: str
    sources: Mapping[str, Source]
    """For ``launch.sbatch`` and ``launch.srun`` also that of each entry."""
    notes: tuple[str, ...] = ()
    """On what of the environment is not passed on."""
    is_run: bool = False
    """Its file is the complete configuration of a run: whatever that run has found in its data is in it."""

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
    from_file = file_layer(path)
    is_run = from_file.keys() >= _IN_EVERY_RUN
    if is_run:
        from_file = in_todays_words(from_file)
    if moved_to is not None:
        from_file = _moved(from_file, moved_to)
    variables, notes = settings_of(env or {})
    cluster = (env or {}).get(CLUSTER)
    if cluster:
        variables.append((CLUSTER, "launch.cluster", cluster))
    layers = [from_file]
    for variable, key, value in variables:
        layers.append({key: (value, Source("environment", variable))})
    layers.append(override_layer(overrides))
    for key, (value, flag) in (flags or {}).items():
        layers.append({key: (value, Source("flag", flag))})
    merged = reduce(merge, layers)
    cluster, written = merged.get("launch.cluster", (None, DEFAULT))
    # The configuration that a run keeps is complete: what its site's profile says by now, or whether it is still there,
    # must not matter.
    if cluster is not None and not (is_run and written.kind == "file"):
        layers.insert(0, profile_layer(str(cluster)))
        merged = merge(layers[0], merged)
    name = path.stem
    if path.name == "config.yaml":
        name = _name_of_run(path.parent)
    if not is_one_line(name):
        why = "It holds a line break or another control character."
        raise UserError(f"{name!r} cannot name a run.", why=why, fix="Rename the file or the folder.")
    sources = {key: source for key, (_, source) in merged.items()} | _entries(layers)
    return Loaded(_validate(merged), name, sources, tuple(notes), is_run)


def _name_of_run(folder: Path) -> str:
    """Return a run's name without its number; a run of a sweep is called after the sweep."""
    if folder.name.isdecimal() and (folder.parent / "sweep.json").is_file():
        folder = folder.parent
    return folder.name.rsplit("-", 1)[0]


def _entries(layers: Iterable[Layer]) -> dict[str, Source]:
    """The source of each entry of the mappings that are merged; ``layers``: from the lowest to the highest."""
    found = {}
    for layer in layers:
        for mapping in OPEN_MAPPINGS:
            value, source = layer.get(mapping, (None, DEFAULT))
            if isinstance(value, dict):
                for name in value:
                    found[f"{mapping}.{str(name).replace('_', '-')}"] = source
    return found


def _moved(layer: Layer, cluster: str) -> Layer:
    """``layer`` at another site: what the profile of the site before has said gives way to that of ``cluster``.

    What differs from that profile, its user has said, of a mapping each entry. It stays.
    """
    there = merge(profile_layer(cluster), {"launch.cluster": (cluster, Source("flag", "--cluster"))})
    before: Layer = {}
    former, _ = layer.get("launch.cluster", (None, DEFAULT))
    if former is not None:
        with suppress(UserError):  # that profile may be gone: then nobody knows what it has said
            before = profile_layer(str(former))
    kept = dict(layer)
    for key in layer.keys() & before.keys():
        value, source = layer[key]
        said, _ = before[key]
        if key in OPEN_MAPPINGS and isinstance(value, dict) and isinstance(said, dict):
            kept[key] = ({name: item for name, item in value.items() if str(said.get(name)) != str(item)}, source)
        elif str(said) == str(value):
            del kept[key]
    return merge(kept, there)


def settled_by(config: Config, settings: Iterable[str]) -> Config:
    """``config`` with ``settings`` (``section.key=value``) in the place of what is there by default.

    Raises UserError as `load` does.
    """
    layer = override_layer(settings)
    default = dict(flatten(Config().model_dump(mode="json")))
    for key, value in flatten(config.model_dump(mode="json")):
        if key not in default or value != default[key]:
            layer[key] = (value, Source("file", "config.yaml"))
    return _validate(layer)


def to_yaml(config: Config) -> str:
    """The complete configuration as YAML; loading it gives an equal `Config`."""
    return yaml.dump(config.model_dump(mode="json"))


def _validate(layer: Layer) -> Config:
    tree: dict[str, Any] = {}
    for key, (value, source) in layer.items():
        if key in SECTIONS:
            fields = list(SECTIONS[key].model_fields)
            what = f"'{key}' is a section, not a value ({source})."
            why = f"'{key}' has: {', '.join(fields)}."
            raise UserError(what, why=why, fix=f"Set one of its keys: {key}.{fields[0]}=VALUE.", key=key)
        *parents, last = key.split(".")
        node = tree
        for depth, parent in enumerate(parents, start=1):
            node = node.setdefault(parent, {})
            above = ".".join(parents[:depth])
            is_setting = above not in SECTIONS and field_of(above) is not None
            if is_setting or not isinstance(node, dict):
                why = f"'{above}' is one value, not a section ({source})."
                raise UserError(f"Unknown key '{key}'.", why=why, fix=f"Give {above}=VALUE.", key=key)
        node[last] = value
    try:
        config = Config.model_validate(tree)
        check_combinations(config)
        return config
    except ImpossibleError as error:
        written = [f"{key} ({layer[key][1]})" for key in error.keys if key in layer]
        where = "" if error.secret else f" Written: {', '.join(written) or 'by default'}."
        raise UserError(error.what, why=f"{error.why}{where}", fix=error.fix, key=error.key) from None
    except ValidationError as error:
        raise explained(error, layer) from None
