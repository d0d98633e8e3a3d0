"""Presets, files, overrides and flags -> one frozen `Config` that remembers where each value came from."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainkit import fileio
from trainkit.config import yaml
from trainkit.config.schema import ALWAYS_WRITTEN, SECTIONS, Config, PluginSection, Section, field_of, is_one_line
from trainkit.config.slurm_options import long_name, settings_of
from trainkit.errors import TrainkitError, UserError, did_you_mean


@dataclass(frozen=True)
class Source:
    """Where a value came from: a kind and, for a person, the place."""

    kind: str  # flag, override, environment, file, cluster profile, default; in a plan also discovered, derived, ...
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()

    @classmethod
    def parse(cls, text: str) -> Source:
        """The source that `str` wrote. The kind is one word, but for ``cluster profile``."""
        kind, where = re.fullmatch(r"(cluster profile|\w*) ?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        return cls(kind, where)


DEFAULT = Source("default")

Layer = dict[str, tuple[Any, Source]]
"""Dotted key -> its value and where that was written."""

# Mappings whose keys are the user's own: merged and validated as one value.
OPEN_MAPPINGS = ("launch.sbatch", "launch.srun")


def override_layer(overrides: Iterable[str]) -> Layer:
    """The layer of overrides, ``section.key=value``. The last one of a key counts."""
    layer: Layer = {}
    texts = list(overrides)
    for index, text in enumerate(texts):
        key, equals, value = text.partition("=")
        shown = text if text.isprintable() else repr(text)
        meant = _meant(text, texts[index + 1 : index + 3])
        if not equals or not key or key.startswith("-") or meant:
            raise UserError(
                f"'{shown}' is not an override.",
                why="Overrides are written section.key=value.",
                fix=f"Write {meant}." if meant else "For example optim.lr=3e-4.",
            )
        parsed = {key: _typed(key, value)}
        for mapping in OPEN_MAPPINGS:
            if key.startswith(f"{mapping}."):  # launch.sbatch.comment=thesis
                parsed = {mapping: {key.removeprefix(f"{mapping}."): value}}
        layer = merge(layer, {item: (given, Source("override", shown)) for item, given in flatten(parsed)})
    return layer


def _meant(text: str, following: Sequence[str]) -> str:
    """What a setting with spaces, a colon or two signs was to be: of ``optim.lr = 3``, ``optim.lr:3``; else empty."""
    match = re.match(r"([\w.]+)( ?==? ?|:=?)(\S+)", " ".join([text, *following]))
    if match is None or match[2] == "=" or "=" in match[3] or match[1] in SECTIONS or field_of(match[1]) is None:
        return ""
    return f"{match[1]}={match[3]}"


def _typed(key: str, text: str) -> Any:
    """The value of an override. What must be text stays as it was typed: account 0123 is no number."""
    value, field = yaml.parse_value(text), field_of(key)
    is_text = field is not None and field.annotation in (str, str | None)
    return value if value is None or not is_text or text[0] in "'\"" else text


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested mappings as dotted keys and values."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in OPEN_MAPPINGS and (value or not prefix):
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def merge(low: Layer, high: Layer) -> Layer:
    """``low`` with everything that ``high`` says."""
    merged = dict(low)
    for key, (value, source) in high.items():
        # Another plugin has other options: those of the one it replaces must not follow it.
        section, _, name = key.partition(".")
        if name == "name" and issubclass(SECTIONS.get(section, Section), PluginSection):
            plugins: type[PluginSection] = SECTIONS[section]  # type: ignore[assignment]
            if low.get(key, (plugins.model_fields["name"].default,))[0] != value:
                for other in [item for item in merged if item.startswith(f"{section}.")]:
                    if not plugins.outlives(other.split(".")[1], str(value)) and other not in high:
                        del merged[other]
        if key in OPEN_MAPPINGS and isinstance(value, dict) and isinstance(low.get(key, (None,))[0], dict):
            value = {**low[key][0], **value}
        merged[key] = (value, source)
    return merged


PACKAGED = fileio.folder("configs")
OWN = Path("configs")
"""The user's own, in the folder where the command is given; they come before the packaged ones."""
_LONGEST_CHAIN = 20
"""Files that extend one another."""
SITE = "site"
"""The section of a profile that holds what is known of the site."""


def find_preset(preset: str) -> Path:
    """The YAML file of a preset name, a path, or a run folder."""
    if not preset.strip():
        raise UserError(
            "The name of the preset is empty.",
            why="A variable of the shell may be unset.",
            fix="For example python -m jobs.submit ddp.",
        )
    given = Path(preset).expanduser()  # os.path takes names that are too long for a file, too: a token, by mistake
    named = presets_named(preset)
    if os.path.isfile(given / "config.yaml"):
        if named:
            raise UserError(
                f"'{preset}' is a preset and a run.",
                why=f"There are {named[0]} and {given.absolute()}.",
                fix=f"Give the path of one of them: ./{preset} is the run.",
            )
        return given / "config.yaml"
    if given.suffix in (".yaml", ".yml"):
        if os.path.isfile(given):
            return given
        raise UserError(f"No file {preset}.", why=f"It is not in {Path.cwd()}.", fix="Check the path.")
    if named:
        return named[0]
    if os.path.isdir(given):
        raise UserError(
            f"{preset} is not a run folder, or only half of one.",
            why="It has no config.yaml.",
            fix="Give a preset, a YAML file, or a run folder.",
        )
    known = sorted(described(), key=lambda name: ("/" in name, name))
    raise UserError(
        f"Unknown preset '{preset}'.",
        why=f"There are: {', '.join(known)}.",
        fix=did_you_mean(preset, known, otherwise="Use one of them, or the path of a YAML file."),
    )


def described() -> dict[str, str]:
    """Every preset that can be named here, the user's own first, with the first sentence of its comment."""
    found: dict[str, str] = {}
    for pattern in ("*.yaml", "recipes/*.yaml"):
        for folder in (OWN, PACKAGED):
            for file in sorted(folder.glob(pattern)):
                found.setdefault(str(file.relative_to(folder).with_suffix("")), _about(file))
    return found


def _about(file: Path) -> str:
    try:
        lines = fileio.read_text(file, follow=True).splitlines()
    except OSError:  # which loading it says
        return ""
    comment = (line[1:].strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines))
    text = " ".join(line for line in comment if not line.startswith("yaml-language-server"))
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0].removesuffix(".")


def presets_named(name: str) -> list[Path]:
    """The files of the presets of that name, the first of which counts; of a path none."""
    if name.startswith(("/", "./", "../", "~")):
        return []
    return [folder / f"{name}.yaml" for folder in (OWN, PACKAGED) if os.path.isfile(folder / f"{name}.yaml")]


def file_layer(path: Path) -> Layer:
    """What a preset's file says, on top of what it extends."""
    layers = [_said(file, values, lines, "file") for file, values, lines in _chain(path)]
    return reduce(merge, reversed(layers))


def files_of(path: Path) -> list[Path]:
    """A preset's file, and those that it extends, nearest first."""
    return [file for file, _, _ in _chain(path)]


def _chain(path: Path) -> list[tuple[Path, dict[str, Any], dict[str, int]]]:
    """A preset's file and those that it extends, nearest first, each with its values and their lines."""
    found = [(path, *yaml.read(path))]
    while (parent := found[-1][1].pop("extends", None)) is not None:
        last, _, lines = found[-1]
        file, seen = _parent(last, parent, lines["extends"]), [item for item, _, _ in found]
        if file.resolve() in [item.resolve() for item in seen]:
            chain = " -> ".join(map(str, [*seen, file]))
            raise UserError(f"{file} extends itself.", why=chain, fix="Break the circle.")
        if len(seen) > _LONGEST_CHAIN:
            why = f"Each of {_LONGEST_CHAIN} files extends the next."
            raise UserError(f"{path} extends too many files.", why=why, fix="Write what they say into fewer.")
        found.append((file, *yaml.read(file)))
    return found


def _said(path: Path, values: Mapping[str, Any], lines: Mapping[str, int], kind: str) -> Layer:
    """The layer of one file. `optim:` with nothing but comments below it says nothing."""
    whole = {key: {} if value is None and key in SECTIONS else value for key, value in values.items()}
    return {key: (value, Source(kind, f"{path}:{lines.get(key, 1)}")) for key, value in flatten(whole)}


def _parent(path: Path, parent: Any, line: int) -> Path:
    """The file that ``path`` extends: beside it first, then as `find_preset` knows it.

    A preset that extends its own name extends the packaged one that it hides.
    """
    if not isinstance(parent, str):
        raise UserError(
            f"extends={parent} is not valid (file {path}:{line}).",
            why="It must be the name of one preset.",
            fix="For example extends: ddp.",
        )
    name = parent if parent.endswith((".yaml", ".yml")) else f"{parent}.yaml"
    beside, packaged = path.parent / name, PACKAGED / name
    is_beside = os.path.isfile(beside)  # False for a name that no file can have
    if is_beside and beside.resolve() == path.resolve() and packaged.is_file():
        return packaged
    try:
        return beside if is_beside else find_preset(parent)
    except UserError as error:
        raise UserError(error.what, why=f"{error.why.removesuffix('.')} (file {path}:{line}).", fix=error.fix) from None


def profile_layer(cluster: str) -> Layer:
    """What the site profile of that name, or in that file, says of a launch.

    What it knows of the site itself, below ``site:``, is no setting (`trainkit.site.profile`).
    """
    path = find_profile(cluster)
    values, lines = yaml.read(path)
    values.pop(SITE, None)
    layer = _said(path, values, lines, "cluster profile")
    for key in layer:
        if not key.startswith("launch.") or key == "launch.cluster":
            raise UserError(
                f"'{key}' does not belong into a cluster profile.",
                why=f"{path}:{lines.get(key, 1)}; a profile describes a site, so it holds launch.* only.",
                fix="Move it to a preset.",
            )
    return layer


def find_profile(cluster: str) -> Path:
    """The file of a site profile: a name in a folder ``configs/clusters``, or a path."""
    given = Path(cluster).expanduser()
    candidates = [given] if given.suffix in (".yaml", ".yml") else []
    candidates += [folder / "clusters" / f"{cluster}.yaml" for folder in (OWN, PACKAGED)]
    for path in candidates:
        if os.path.isfile(path):
            return path
    known = sorted(file.stem for folder in (OWN, PACKAGED) for file in folder.glob("clusters/*.yaml"))
    raise UserError(
        f"Unknown cluster profile '{cluster}'.",
        why=f"There are: {', '.join(dict.fromkeys(known)) or 'none'}.",
        fix=did_you_mean(cluster, known, otherwise="Write configs/clusters/NAME.yaml, or give the path of a file."),
    )


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
    from_file = file_layer(path)
    if moved_to is not None:
        from_file = _moved(from_file, moved_to)
    given = env or {}
    variables, notes = settings_of(given)
    variables += [(CLUSTER, "launch.cluster", given[CLUSTER])] if given.get(CLUSTER) else []
    layers: list[Layer] = [from_file, *({key: (value, Source("environment", name))} for name, key, value in variables)]
    layers += [override_layer(overrides)]
    layers += [{key: (value, Source("flag", flag)) for key, (value, flag) in (flags or {}).items()}]
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
    """``layer`` at another site: what the profile of the site before has said gives way to that of ``cluster``.

    What differs from that profile, its user has said, of a mapping each entry. It stays.
    """
    there = merge(profile_layer(cluster), {"launch.cluster": (cluster, Source("flag", "--cluster"))})
    before: Layer = {}
    if "launch.cluster" in layer and layer["launch.cluster"][0] is not None:
        with suppress(UserError):  # that profile may be gone: then nobody knows what it has said
            before = profile_layer(str(layer["launch.cluster"][0]))
    kept: Layer = {}
    for key, (value, source) in layer.items():
        said = before[key][0] if key in before else None
        if key in OPEN_MAPPINGS and isinstance(value, dict) and isinstance(said, dict):
            kept[key] = ({name: item for name, item in value.items() if str(said.get(name)) != str(item)}, source)
        elif key not in before or str(said) != str(value):
            kept[key] = (value, source)
    return merge(kept, there)


def to_yaml(config: Config) -> str:
    """The complete configuration as YAML; loading it gives an equal `Config`."""
    return yaml.dump(config.model_dump(mode="json"))


def _validate(layer: Layer) -> Config:
    from trainkit.config import refusals  # which stands on this module

    tree: dict[str, Any] = {}
    for key, (value, source) in layer.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                if parent in SECTIONS and node is tree:
                    raise refusals.value_for_section(parent, child, layer[parent][1])
                raise refusals.below_a_value(key, layer)
            node = child
        if last in SECTIONS and node is tree:
            raise refusals.value_for_section(last, value, source)
        node[last] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise refusals.explain(error, layer) from None
