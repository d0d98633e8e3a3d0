"""Presets, files, overrides and flags -> one frozen `Config` that remembers where each value came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainkit import packaged
from trainkit.config import yaml
from trainkit.config.schema import SECTIONS, Config, field_of
from trainkit.config.section import PluginSection, Section
from trainkit.errors import UserError, did_you_mean

PACKAGED = packaged.folder("configs")

# sbatch's own environment variables that users set in their shell profile; sbatch ranks them above the script's header.
ENVIRONMENT = {
    "SBATCH_ACCOUNT": "launch.account",
    "SBATCH_PARTITION": "launch.partition",
    "SBATCH_QOS": "launch.qos",
    "SBATCH_CONSTRAINT": "launch.constraint",
    "SBATCH_RESERVATION": "launch.reservation",
    "TRAINKIT_CLUSTER": "launch.cluster",
}


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


@dataclass(frozen=True)
class Loaded:
    """A configuration, the preset's name, and the source of every key that is not a default."""

    config: Config
    name: str
    sources: Mapping[str, Source]

    def source(self, key: str) -> Source:
        """Source of a dotted key, ``DEFAULT`` when nobody set it."""
        return self.sources.get(key, DEFAULT)

    @contextmanager
    def pointing_at_sources(self) -> Iterator[None]:
        """Checks made inside, of a plugin's name or options, also say where the key that they name was written."""
        try:
            yield
        except UserError as error:
            keys = [word for word in re.findall(r"[a-z_0-9]+\.[\w.-]+", error.what) if word in self.sources]
            names = {f"{section}.name": getattr(self.config, section).name for section in ("model", "data", "strategy")}
            keys += [key for key, name in names.items() if f"'{name}'" in error.what and key in self.sources]
            named = keys[0] if keys else None
            if named is None or str(self.sources[named]) in str(error):
                raise
            why = f"{error.why.removesuffix('.')} " if error.why else "Written there "
            raise type(error)(error.what, why=f"{why}({self.sources[named]}).", fix=error.fix) from error.__cause__


Layer = dict[str, tuple[Any, Source]]


def load(
    preset: str,
    overrides: Iterable[str] = (),
    *,
    flags: Mapping[str, tuple[Any, str]] | None = None,
    env: Mapping[str, str] | None = None,
) -> Loaded:
    """The configuration of ``preset`` with everything that outranks it.

    Precedence, highest first: flags and overrides, environment, file, cluster profile, default.

    Args:
        preset: a name in ``configs/``, or the path of a YAML file or of a run folder.
        overrides: ``section.key=value``.
        flags: dotted key -> (value, the flag as it was written).
        env: the environment; only the variables in `ENVIRONMENT` count.

    Raises:
        UserError: unknown preset or key, wrong type, impossible combination; names the key and where it was written.
    """
    path = find_preset(preset)
    from_file = _file_layer(path, ())
    given = env or {}
    from_env: Layer = {
        key: (given[name], Source("environment", name)) for name, key in ENVIRONMENT.items() if given.get(name)
    }
    from_flags: Layer = {key: (value, Source("flag", flag)) for key, (value, flag) in (flags or {}).items()}
    above = _merge(_merge(from_env, _override_layer(overrides)), from_flags)
    merged = _merge(from_file, above)
    cluster = merged.get("launch.cluster", (None,))[0]
    if cluster is not None:
        merged = _merge(_profile_layer(str(cluster)), merged)
    name = path.parent.name.rsplit("-", 1)[0] if path.name == "config.yaml" else path.stem
    return Loaded(_validate(merged), name, {key: source for key, (_, source) in merged.items()})


def find_preset(preset: str) -> Path:
    """The YAML file of a preset name, a path, or a run folder."""
    given = Path(preset).expanduser()
    if given.is_dir() and (given / "config.yaml").is_file():
        return given / "config.yaml"
    if given.suffix in (".yaml", ".yml"):
        if given.is_file():
            return given
        raise UserError(f"No file {preset}.", why=f"It is not in {Path.cwd()}.", fix="Check the path.")
    folders = [folder for folder in (Path("configs"), PACKAGED) if folder.is_dir()]
    for folder in folders:
        if (folder / f"{preset}.yaml").is_file():
            return folder / f"{preset}.yaml"
    if given.is_dir():
        raise UserError(
            f"{preset} is not a run folder, or only half of one.",
            why="It has no config.yaml.",
            fix="Give a preset, a YAML file, or another run folder.",
        )
    known = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    known += sorted({f"recipes/{file.stem}" for folder in folders for file in folder.glob("recipes/*.yaml")})
    raise UserError(
        f"Unknown preset '{preset}'.",
        why=f"There are: {', '.join(known)}.",
        fix=did_you_mean(preset, known, otherwise="Use one of them, or the path of a YAML file."),
    )


def to_yaml(config: Config) -> str:
    """The complete configuration as YAML; loading it gives an equal `Config`."""
    return yaml.dump(config.model_dump(mode="json"))


def _file_layer(path: Path, seen: tuple[Path, ...]) -> Layer:
    if path.resolve() in [item.resolve() for item in seen]:
        chain = " -> ".join(str(item) for item in (*seen, path))
        raise UserError(f"{path} extends itself.", why=chain, fix="Break the circle.")
    values, lines = yaml.read(path)
    base: Layer = {}
    parent = values.pop("extends", None)
    if parent is not None:
        base = _file_layer(_parent(path, parent, lines["extends"]), (*seen, path))
    own: Layer = {}
    for key, value in _flatten({key: {} if _is_bare(key, value) else value for key, value in values.items()}):
        own[key] = (value, Source("file", f"{path}:{lines.get(key, 1)}"))
    return _merge(base, own)


def _parent(path: Path, parent: Any, line: int) -> Path:
    """The file that ``path`` extends: beside it first, then as `find_preset` knows it."""
    if not isinstance(parent, str):
        raise UserError(
            f"extends={parent} is not valid (file {path}:{line}).",
            why="It must be the name of one preset.",
            fix="For example extends: ddp.",
        )
    beside = path.parent / (parent if parent.endswith((".yaml", ".yml")) else f"{parent}.yaml")
    try:
        return beside if beside.is_file() else find_preset(parent)
    except UserError as error:
        raise UserError(error.what, why=f"{error.why.removesuffix('.')} (file {path}:{line}).", fix=error.fix) from None


def _is_bare(key: str, value: Any) -> bool:
    # `optim:` with nothing but comments below it says nothing, rather than that there is no optimizer.
    return value is None and key in SECTIONS


def _profile_layer(cluster: str) -> Layer:
    given = Path(cluster).expanduser()
    candidates = [given] if given.suffix in (".yaml", ".yml") else []
    candidates += [folder / "clusters" / f"{cluster}.yaml" for folder in (Path("configs"), PACKAGED)]
    for path in candidates:
        if path.is_file():
            values, lines = yaml.read(path)
            layer: Layer = {}
            for key, value in _flatten(values):
                if not key.startswith("launch.") or key == "launch.cluster":
                    raise UserError(
                        f"'{key}' does not belong into a cluster profile.",
                        why=f"{path}:{lines.get(key, 1)}; a profile describes a site, so it holds launch.* only.",
                        fix="Move it to a preset.",
                    )
                layer[key] = (value, Source("cluster profile", f"{path}:{lines.get(key, 1)}"))
            return layer
    known = sorted(file.stem for folder in (Path("configs"), PACKAGED) for file in folder.glob("clusters/*.yaml"))
    raise UserError(
        f"Unknown cluster profile '{cluster}'.",
        why=f"There are: {', '.join(dict.fromkeys(known)) or 'none'}.",
        fix=did_you_mean(cluster, known, otherwise="Write configs/clusters/NAME.yaml, or give the path of a file."),
    )


def _override_layer(overrides: Iterable[str]) -> Layer:
    layer: Layer = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key or key.startswith("-"):
            raise UserError(
                f"'{text}' is not an override.",
                why="Overrides are written section.key=value.",
                fix="For example optim.lr=3e-4.",
            )
        parsed = {key: _typed(key, value)}
        for mapping in _OPEN_MAPPINGS:
            if key.startswith(f"{mapping}."):  # launch.sbatch.comment=thesis
                parsed = {mapping: {key.removeprefix(f"{mapping}."): value}}
        layer = _merge(layer, {item: (given, Source("override", text)) for item, given in _flatten(parsed)})
    return layer


def _typed(key: str, text: str) -> Any:
    """The value of an override. What must be text stays as it was typed: account 0123 is no number."""
    value, field = yaml.parse_value(text), field_of(key)
    is_text = field is not None and field.annotation in (str, str | None)
    return value if value is None or not is_text or text[0] in "'\"" else text


# Mappings whose keys are the user's own: merged and validated as one value.
_OPEN_MAPPINGS = ("launch.sbatch", "launch.srun")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in _OPEN_MAPPINGS and (value or not prefix):
            yield from _flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def _merge(low: Layer, high: Layer) -> Layer:
    merged = dict(low)
    for key, (value, source) in high.items():
        # Another plugin has other options: those of the one it replaces must not follow it.
        section, _, name = key.partition(".")
        if name == "name" and issubclass(SECTIONS.get(section, Section), PluginSection):
            fields = SECTIONS[section].model_fields
            if low.get(key, (fields["name"].default,))[0] != value:
                for other in [item for item in merged if item.startswith(f"{section}.")]:
                    if other.split(".")[1] not in fields and other not in high:
                        del merged[other]
        if key in _OPEN_MAPPINGS and isinstance(value, dict) and isinstance(low.get(key, (None,))[0], dict):
            value = {**low[key][0], **value}
        merged[key] = (value, source)
    return merged


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
