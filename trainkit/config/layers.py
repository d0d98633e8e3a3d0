"""Layers of a configuration: values with the places where they were written, how one covers another, and errors."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from trainkit.common.errors import UserError, did_you_mean
from trainkit.config import yaml
from trainkit.config.schema import SECTIONS, Config, PluginSection, Section, field_of
from trainkit.config.source import Source

DEFAULT = Source("default")

Layer = dict[str, tuple[Any, Source]]
"""Dotted key -> its value and where that was written."""

# Mappings whose keys are the user's own: merged and validated as one value.
OPEN_MAPPINGS = ("launch.sbatch", "launch.srun", "script.values")


def override_layer(overrides: Iterable[str]) -> Layer:
    """The layer of overrides, ``section.key=value``. The last one of a key counts."""
    layer: Layer = {}
    # Names of plugins first: an option that is given before the name of its plugin is that plugin's, too.
    for text in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".name")):
        key, equals, value = text.partition("=")
        shown = text if text.isprintable() else repr(text)
        if not equals or not key or key.startswith("-"):
            why = "Overrides have the form section.key=value, without spaces."
            raise UserError(f"'{shown}' is not an override.", why=why, fix="For example optim.lr=3e-4.")
        parsed = {key: _override_value(key, value)}
        for mapping in OPEN_MAPPINGS:  # launch.sbatch.comment=x
            if key.startswith(f"{mapping}."):
                parsed = {mapping: {key.removeprefix(f"{mapping}."): value}}
        layer = merge(layer, layer_of(parsed, Source("override", shown)))
    return layer


def layer_of(values: Mapping[str, Any], source: Source) -> Layer:
    """A layer of nested mappings, all from one place."""
    return {key: (value, source) for key, value in flatten(values)}


def _override_value(key: str, text: str) -> Any:
    """The value of an override. What must be text stays as it was typed: account 0123 is no number."""
    value = yaml.parse_value(text)
    field = field_of(key)
    if value is None or field is None or key in SECTIONS or text[0] in "'\"":
        return value
    return text if takes_text(field.annotation) else value


def takes_text(annotation: Any) -> bool:
    if get_origin(annotation) in (tuple, dict):
        return False
    return annotation is str or any(map(takes_text, get_args(annotation)))


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
            before, _ = low.get(key, (model.model_fields["name"].default, DEFAULT))
            for other in list(merged):
                inside, _, option = other.partition(".")
                is_lost = inside == section and not model.outlives(option.partition(".")[0], str(value))
                if before != value and is_lost and other not in high:
                    del merged[other]
        if key in OPEN_MAPPINGS and isinstance(value, dict):
            below, _ = low.get(key, (None, DEFAULT))
            if isinstance(below, dict):
                value = below | value
        merged[key] = (value, source)
    return merged


def meant_by(name: str) -> str:
    """The setting that a name may stand for: one without its section (``lr``) or in another (``train.lr``), a section
    alone (``model``), or what other programs call it (``learning_rate``); else empty."""
    name = name.lower().replace("-", "_")
    keys = _keys()
    for key in (name, f"{name}.name"):
        if key in keys:
            return key
    last = name.rpartition(".")[2]
    for key, names in yaml.packaged("other_names").items():
        if last in names.split():
            return str(key)
    for key in keys:
        if f".{key}".endswith(f".{last}"):
            return key
    return ""


def _keys() -> list[str]:
    """All settings."""
    keys = list[str]()
    for name in Config.model_fields:
        if name in SECTIONS:
            keys += [f"{name}.{key}" for key in SECTIONS[name].model_fields]
        else:
            keys.append(name)
    return keys


def explained(error: ValidationError, layer: Layer) -> UserError:
    """The first problem that pydantic found in the tree built from ``layer``, for the person who wrote it."""
    problem = error.errors(include_url=False)[0]
    location = list(map(str, problem["loc"]))
    context = problem.get("ctx", {})
    if problem["type"] == "extra_forbidden":
        return _unknown_key(".".join([*location, *context.values()]), layer)
    # Members of a union and items of a list put their own names behind the key; keep the setting itself.
    key = ".".join(location[: 2 if location[0] in SECTIONS else 1])
    return _wrong_value(key, problem["input"], str(context.get("error", "")), layer)


def _unknown_key(key: str, layer: Layer) -> UserError:
    # An unknown section is reported by its name alone; show one of the settings that were to go into it.
    inside = [item for item in layer if item.startswith(f"{key}.")]
    if key not in layer and inside:
        key = inside[0]
    section = key.rpartition(".")[0].partition(".")[0]
    _, source = layer.get(key, (None, DEFAULT))
    near = _keys()
    why = f"The sections are: {', '.join(Config.model_fields)} ({source})."
    if section in SECTIONS:
        near = [f"{section}.{name}" for name in SECTIONS[section].model_fields]
        why = f"'{section}' has: {', '.join(SECTIONS[section].model_fields)} ({source})."
    best = meant_by(key)
    fix = f"Did you mean '{best}'?"
    if not best:
        fix = did_you_mean(key, near, otherwise=f"Use one of these, or remove '{key}'.")
    return UserError(f"Unknown key '{key if key.isprintable() else repr(key)}'.", why=why, fix=fix, key=key)


def _wrong_value(key: str, given: Any, cause: str, layer: Layer) -> UserError:
    value, source = layer.get(key, (given, DEFAULT))
    field = field_of(key)
    assert field is not None, key
    section, _, name = key.rpartition(".")
    wanted = type_in_words(SECTIONS.get(section, Config).model_json_schema()["properties"][name])
    fix = "Correct the value, or omit it."
    if takes_text(field.annotation) and isinstance(value, int | float):
        fix = f"Put it in quotes: {name}: '{_shown(value)}'."
    elif field.default not in (None, (), {}):
        name = source.where + " " if source.kind == "flag" else f"{key}="
        fix = f"For example {name}{_shown(field.default)}."
    fix = did_you_mean(str(given), wanted.split(" | "), otherwise=fix)  # a choice, misspelt
    what = f"{key}={_shown(value)} is not valid ({source})."
    if source.kind == "flag":
        what = f"{source.where} {_shown(value)} is not valid."
    return UserError(what, why=f"{key} must be {cause or wanted}.", fix=fix, key=key)


def _shown(value: Any) -> str:
    """A value as one would write it in YAML or in an override."""
    if isinstance(value, str):
        if value and value == value.strip() and value.isprintable():
            return value
        return repr(value)
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
