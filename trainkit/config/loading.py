"""Load a configuration from its layers, and say what is wrong with one: the key, where it stands, what is right."""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from trainkit import fileio
from trainkit.config import yaml
from trainkit.config.schema import SECTIONS, Config, ImpossibleError, PluginSection, Section, field_of, is_one_line
from trainkit.config.slurm_options import settings_of
from trainkit.errors import TrainkitError, UserError, did_you_mean, unknown


@dataclass(frozen=True)
class Source:
    """Where a value came from: a kind and, for a person, the place."""

    kind: str  # flag, override, environment, file, cluster profile, default; in a plan also discovered, derived, ...
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()

    @classmethod
    def parse(cls, text: str) -> "Source":
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
    # Names of plugins first: an option that is given before the name of its plugin is that plugin's, too.
    for text in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".name")):
        key, equals, value = text.partition("=")
        shown = text if text.isprintable() else repr(text)
        if not equals or not key or key.startswith("-"):
            why = "Overrides are written section.key=value, without spaces."
            raise UserError(f"'{shown}' is not an override.", why=why, fix="For example optim.lr=3e-4.")
        mapping = next((name for name in OPEN_MAPPINGS if key.startswith(f"{name}.")), "")  # launch.sbatch.comment=x
        entry = key.removeprefix(f"{mapping}.")
        parsed = {mapping: {entry: value}} if mapping else {key: _override_value(key, value)}
        layer = merge(layer, {item: (given, Source("override", shown)) for item, given in flatten(parsed)})
    return layer


def _override_value(key: str, text: str) -> Any:
    """The value of an override. What must be text stays as it was typed: account 0123 is no number."""
    value, field = yaml.parse_value(text), field_of(key)
    is_text = field is not None and key not in SECTIONS and _takes_text(field.annotation)
    return value if value is None or not is_text or text[0] in "'\"" else text


def _takes_text(annotation: Any) -> bool:
    if get_origin(annotation) in (tuple, dict):
        return False
    return annotation is str or any(map(_takes_text, get_args(annotation)))


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
        model = SECTIONS.get(section, Section)
        if name == "name" and issubclass(model, PluginSection):
            before = low[key][0] if key in low else model.model_fields["name"].default
            for other in [item for item in merged if item.startswith(f"{section}.") and before != value]:
                if not model.outlives(other.split(".")[1], str(value)) and other not in high:
                    del merged[other]
        if key in OPEN_MAPPINGS and isinstance(value, dict) and isinstance(low.get(key, (None,))[0], dict):
            value = {**low[key][0], **value}
        merged[key] = (value, source)
    return merged


PACKAGED = fileio.folder("configs")
OWN = Path("configs")
"""The user's own, in the folder where the command is given; they come before the packaged ones."""
SITE = "site"
"""The section of a profile that holds what is known of the site."""


def find_preset(preset: str) -> Path:
    """The YAML file of a preset name, a path, or a run folder."""
    if not preset.strip():
        what, why = "The name of the preset is empty.", "A variable of the shell may be unset."
        raise UserError(what, why=why, fix="For example python -m jobs.submit ddp.")
    given = Path(preset).expanduser()  # os.path takes names that are too long for a file, too: a token, by mistake
    named = presets_named(preset)
    if os.path.isfile(given / "config.yaml"):
        if named:
            why, fix = f"There are {named[0]} and {given.absolute()}.", f"Give the path of one: ./{preset} is the run."
            raise UserError(f"'{preset}' is a preset and a run.", why=why, fix=fix)
        return given / "config.yaml"
    if given.suffix in (".yaml", ".yml"):
        if os.path.isfile(given):
            return given
        raise UserError(f"No file {preset}.", why=f"It is not in {Path.cwd()}.", fix="Check the path.")
    if named:
        return named[0]
    if os.path.isdir(given):
        what = f"{preset} is not a run folder, or only half of one."
        raise UserError(what, why="It has no config.yaml.", fix="Give a preset, a YAML file, or a run folder.")
    known = sorted(described(), key=lambda name: ("/" in name, name))
    raise unknown("preset", preset, known, otherwise="Use one of them, or the path of a YAML file.")


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
    layers = [_layer_of_file(file, values, lines, "file") for file, values, lines in _chain(path)]
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
        found.append((file, *yaml.read(file)))
    return found


def _layer_of_file(path: Path, values: Mapping[str, Any], lines: Mapping[str, int], kind: str) -> Layer:
    """The layer of one file. `optim:` with nothing but comments below it says nothing."""
    whole = {key: {} if value is None and key in SECTIONS else value for key, value in values.items()}
    return {key: (value, Source(kind, f"{path}:{lines.get(key, 1)}")) for key, value in flatten(whole)}


def _parent(path: Path, parent: Any, line: int) -> Path:
    """The file that ``path`` extends: beside it first, then as `find_preset` knows it.

    A preset that extends its own name extends the packaged one that it hides.
    """
    if not isinstance(parent, str):
        what, why = f"extends={parent} is not valid (file {path}:{line}).", "It must be the name of one preset."
        raise UserError(what, why=why, fix="For example extends: ddp.")
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
    layer = _layer_of_file(path, values, lines, "cluster profile")
    for key in layer:
        if not key.startswith("launch.") or key == "launch.cluster":
            why = f"{path}:{lines.get(key, 1)}; a profile describes a site, so it holds launch.* only."
            raise UserError(f"'{key}' does not belong into a cluster profile.", why=why, fix="Move it to a preset.")
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
    otherwise = "Write configs/clusters/NAME.yaml, or give the path of a file."
    raise unknown("cluster profile", cluster, known, otherwise=otherwise)


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
    """Of ``launch.sbatch`` and ``launch.srun`` also that of each entry."""
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
            if (source := self.sources.get(error.key or "")) is None or str(source) in str(error):
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
    variables, notes = settings_of(env or {})
    if cluster := (env or {}).get(CLUSTER):
        variables.append((CLUSTER, "launch.cluster", cluster))
    layers: list[Layer] = [from_file, *({key: (value, Source("environment", name))} for name, key, value in variables)]
    layers += [override_layer(overrides)]
    layers += [{key: (value, Source("flag", flag)) for key, (value, flag) in (flags or {}).items()}]
    merged = reduce(merge, layers)
    cluster, written = merged.get("launch.cluster", (None, DEFAULT))
    # The configuration that a run keeps is complete: what its site's profile says by now, or whether it is still there,
    # must not matter.
    is_run = from_file.keys() >= _IN_EVERY_RUN
    if cluster is not None and not (is_run and written.kind == "file"):
        layers.insert(0, profile_layer(str(cluster)))
        merged = merge(layers[0], merged)
    name = path.parent.name.rsplit("-", 1)[0] if path.name == "config.yaml" else path.stem
    if not is_one_line(name):
        why, fix = "It holds a line break or another control character.", "Rename the file or the folder."
        raise UserError(f"{name!r} cannot name a run.", why=why, fix=fix)
    sources = {key: source for key, (_, source) in merged.items()} | _entries(layers)
    return Loaded(_validate(merged), name, sources, tuple(notes), is_run)


def _entries(layers: Iterable[Layer]) -> dict[str, Source]:
    """The source of each entry of the mappings that are merged; ``layers``: from the lowest to the highest."""
    found = {}
    for layer in layers:
        for mapping in OPEN_MAPPINGS:
            value, source = layer.get(mapping, (None, DEFAULT))
            for name in value if isinstance(value, dict) else ():
                found[f"{mapping}.{str(name).replace('_', '-')}"] = source
    return found


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
    tree: dict[str, Any] = {}
    for key, (value, source) in layer.items():
        if key in SECTIONS:
            fields = list(SECTIONS[key].model_fields)
            what, why = f"'{key}' is a section, not a value ({source}).", f"'{key}' has: {', '.join(fields)}."
            raise UserError(what, why=why, fix=f"Set one of its keys: {key}.{fields[0]}=VALUE.", key=key)
        *parents, last = key.split(".")
        node = tree
        for depth, parent in enumerate(parents, start=1):
            node, above = node.setdefault(parent, {}), ".".join(parents[:depth])
            is_setting = above not in SECTIONS and field_of(above) is not None
            if is_setting or not isinstance(node, dict):
                why = f"'{above}' is one value, not a section ({source})."
                raise UserError(f"Unknown key '{key}'.", why=why, fix=f"Give {above}=VALUE.", key=key)
        node[last] = value
    try:
        return Config.model_validate(tree)
    except ImpossibleError as error:
        written = [f"{key} ({layer[key][1]})" for key in error.keys if key in layer]
        where = "" if error.secret else f" Written: {', '.join(written) or 'by default'}."
        raise UserError(error.what, why=f"{error.why}{where}", fix=error.fix, key=error.key) from None
    except ValidationError as error:
        raise _explain(error, layer) from None


def meant_by(name: str) -> str:
    """The setting that a name may stand for: one without its section (``lr``) or in another (``train.lr``), a section
    alone (``model``), or what other programs call it (``learning_rate``); else empty."""
    name, keys = name.lower().replace("-", "_"), _keys()
    for key in (name, f"{name}.name"):
        if key in keys:
            return key
    last = name.rpartition(".")[2]
    called = (key for key, names in yaml.packaged("other_names").items() if last in names.split())
    same = (key for key in keys if f".{key}".endswith(f".{last}"))
    return next(itertools.chain(called, same), "")


def _keys() -> list[str]:
    """All settings."""
    inside = [f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields]
    return [*(name for name in Config.model_fields if name not in SECTIONS), *inside]


def _explain(error: ValidationError, layer: Layer) -> UserError:
    """The first problem that pydantic found in the tree built from ``layer``, for the person who wrote it."""
    problem = error.errors(include_url=False)[0]
    location, context = list(map(str, problem["loc"])), problem.get("ctx", {})
    if problem["type"] == "extra_forbidden":
        return _unknown_key(".".join([*location, *context.values()]), layer)
    # Members of a union and items of a list put their own names behind the key; keep the setting itself.
    key = ".".join(location[: 2 if location[0] in SECTIONS else 1])
    return _wrong_value(key, problem["input"], str(context.get("error", "")), layer)


def _unknown_key(key: str, layer: Layer) -> UserError:
    # An unknown section is reported by its name alone; show one of the settings that were to go into it.
    written = key if key in layer else next((item for item in layer if item.startswith(f"{key}.")), key)
    section = written.partition(".")[0] if "." in written else ""
    named = f"'{section}' has" if section in SECTIONS else "The sections are"
    has = ", ".join(SECTIONS.get(section, Config).model_fields)
    best = meant_by(written)
    near = [name for name in _keys() if section not in SECTIONS or name.startswith(f"{section}.")]
    otherwise = did_you_mean(written, near, otherwise=f"Use one of these, or remove '{written}'.")
    return UserError(
        f"Unknown key '{written if written.isprintable() else repr(written)}'.",
        why=f"{named}: {has} ({layer.get(written, (None, DEFAULT))[1]}).",
        fix=f"Did you mean '{best}'?" if best else otherwise,
        key=written,
    )


def _wrong_value(key: str, given: Any, cause: str, layer: Layer) -> UserError:
    value, source = layer.get(key, (given, DEFAULT))
    field = field_of(key)
    assert field is not None, key
    section, _, name = key.rpartition(".")
    wanted = type_in_words(SECTIONS.get(section, Config).model_json_schema()["properties"][name])
    fix = "Give such a value, or leave it out."
    if _takes_text(field.annotation) and isinstance(value, int | float):
        fix = f"Put it in quotes: {name}: '{_shown(value)}'."
    elif field.default not in (None, (), {}):
        fix = f"For example {_written(key, field.default, source)}."
    fix = did_you_mean(str(given), wanted.split(" | "), otherwise=fix)  # a choice, misspelt
    what = f"{_written(key, value, source)} is not valid" + ("." if source.kind == "flag" else f" ({source}).")
    return UserError(what, why=f"{key} must be {cause or wanted}.", fix=fix, key=key)


def _written(key: str, value: Any, source: Source) -> str:
    """``--nodes 0`` for what came by a flag, else ``launch.nodes=0``."""
    return f"{source.where} {_shown(value)}" if source.kind == "flag" else f"{key}={_shown(value)}"


def _shown(value: Any) -> str:
    """A value as one would write it in YAML or in an override."""
    if isinstance(value, str):
        return value if value and value == value.strip() and value.isprintable() else repr(value)
    try:
        return json.dumps(value).replace('"', "")  # true, null, [0.9, 0.999]: the same words as in YAML
    except TypeError:
        return str(value)


_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "text", "object": "{name: text}"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def type_in_words(field: Mapping[str, Any]) -> str:
    """The type of a JSON schema in words: ``int > 0 | auto | null``."""
    if "anyOf" in field:
        return " | ".join(map(type_in_words, field["anyOf"]))
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    if "prefixItems" in field:
        return f"[{', '.join(map(type_in_words, field['prefixItems']))}]"
    if field.get("type") == "array":
        return f"[{type_in_words(field.get('items', {}))}, ...]"
    kind = field.get("type", "any")
    bounds = [f"{sign} {field[word]:.10g}" for word, sign in _BOUNDS.items() if word in field]
    return f"{_TYPES.get(kind, kind)} {' and '.join(bounds)}".strip()
