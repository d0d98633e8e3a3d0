"""Presets, files, overrides and flags -> one frozen `Config` that remembers where each value came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trainkit.config import yaml
from trainkit.config.schema import Config
from trainkit.errors import UserError, did_you_mean

PACKAGED = Path(__file__).resolve().parents[2] / "configs"

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

    kind: str  # flag, override, environment, file, cluster profile, default
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()


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
    from_env: Layer = {
        key: (env[name], Source("environment", name)) for name, key in ENVIRONMENT.items() if (env or {}).get(name)
    }
    from_flags: Layer = {key: (value, Source("flag", flag)) for key, (value, flag) in (flags or {}).items()}
    above = {**from_env, **_override_layer(overrides), **from_flags}
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
        raise UserError(f"No file {preset}.", why="It does not exist here.", fix="Check the path.")
    folders = [folder for folder in (Path("configs"), PACKAGED) if folder.is_dir()]
    for folder in folders:
        if (folder / f"{preset}.yaml").is_file():
            return folder / f"{preset}.yaml"
    known = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    raise UserError(
        f"Unknown preset '{preset}'.",
        why=f"There are: {', '.join(known)}.",
        fix=did_you_mean(preset, known, otherwise="Use one of them, or the path of a YAML file."),
    )


def to_yaml(config: Config) -> str:
    """The complete configuration as YAML; loading it gives an equal `Config`."""
    return yaml.dump(config.model_dump(mode="json"))


def _file_layer(path: Path, seen: tuple[Path, ...]) -> Layer:
    if path in seen:
        chain = " -> ".join(str(item) for item in (*seen, path))
        raise UserError(f"{path} extends itself.", why=chain, fix="Break the circle.")
    values, lines = yaml.read(path)
    base: Layer = {}
    parent = values.pop("extends", None)
    if parent is not None:
        sibling = path.parent / f"{parent}.yaml"
        base = _file_layer(sibling if sibling.is_file() else find_preset(str(parent)), (*seen, path))
    own: Layer = {}
    for key, value in _flatten(values):
        own[key] = (value, Source("file", f"{path}:{lines.get(key, 1)}"))
    return _merge(base, own)


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
        for flat_key, flat_value in _flatten({key: yaml.parse_value(value)}):
            layer[flat_key] = (flat_value, Source("override", text))
    return layer


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
        section, _, field = key.partition(".")
        if section in ("model", "data", "strategy") and field == "name" and low.get(key, (None,))[0] != value:
            own_fields = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
            for other in [item for item in merged if item.startswith(f"{section}.")]:
                if other.split(".")[1] not in own_fields and other not in high:
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
                raise UserError(
                    f"'{key}' cannot be set.", why=f"'{parent}' is a value, not a section ({source}).", fix="Remove one."
                )
            node = child
        node[last] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, layer) from None


def _explain(error: ValidationError, layer: Layer) -> UserError:
    problem = error.errors()[0]
    # Members of a union put their own name into the location; keep what is a key of the configuration.
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    while key and key not in layer and not any(item.startswith(f"{key}.") for item in layer):
        location.pop()
        key = ".".join(location)
    key = key or ".".join(str(part) for part in problem["loc"])
    sources = [str(source) for item, (_, source) in layer.items() if item == key or item.startswith(f"{key}.")]
    where = sources[0] if sources else "default"
    if problem["type"] == "extra_forbidden":
        section, has = _fields(key)
        named = f"'{section}' has" if section else "The sections are"
        return UserError(
            f"Unknown key '{key}'.",
            why=f"{named}: {', '.join(has)} ({where}).",
            fix=_nearest_key(key, section, has),
        )
    if problem["type"] == "value_error":  # raised by a validator of ours, whose message is a sentence
        message = str(problem["ctx"]["error"])
        if key in layer:
            return UserError(f"{key}={layer[key][0]!r} is not valid ({where}).", why=f"It must be {message}.", fix=f"Change {key}.")
        written = [f"{item} ({source})" for item, (_, source) in layer.items() if item in message]
        return UserError(f"{message}.", why="; ".join(written) or "It follows from the defaults.", fix="Change one of them.")
    value = layer[key][0] if key in layer else problem["input"]
    expected = problem["msg"].removeprefix("Input should be ").replace("a valid ", "a ")
    fix = f"Give {expected}."
    literals = [item.strip("' ") for item in expected.replace(" or ", ", ").split(",")]
    if problem["type"] == "literal_error":
        fix = did_you_mean(str(value), literals, otherwise=fix)
    return UserError(f"{key}={value!r} is not valid ({where}).", why=f"It must be {expected}.", fix=fix)


def _fields(key: str) -> tuple[str, list[str]]:
    section, _, rest = key.rpartition(".")
    if not section:
        return "", list(Config.model_fields)
    field = Config.model_fields.get(section)
    model = field.annotation if field else None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return section, list(model.model_fields)
    return "", list(Config.model_fields)


def _nearest_key(key: str, section: str, has: list[str]) -> str:
    prefix = f"{section}." if section else ""
    everywhere = [
        f"{name}.{field}"
        for name, info in Config.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        for field in info.annotation.model_fields
    ]
    last = key.rpartition(".")[2]
    same_name = [item for item in everywhere if item.endswith(f".{last}")]
    near = did_you_mean(key, [f"{prefix}{item}" for item in has])
    return near or (f"Did you mean '{same_name[0]}'?" if same_name else did_you_mean(key, everywhere, otherwise=f"Remove '{key}'."))
