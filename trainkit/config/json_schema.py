"""All settings: the JSON schema by which editors complete presets, and the same as lines for people.

``python -m trainkit.config.json_schema > configs/schema.json`` is called at each release, with the names of the timm
and torchvision that are installed then: `trainkit.config.plugins` reads them from their source, so neither is imported.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, TypeAdapter

from trainkit.common.errors import unknown
from trainkit.config import plugin_options, plugins, yaml
from trainkit.config.layers import type_in_words
from trainkit.config.libraries import timm_models, torchvision_models, usable_names
from trainkit.config.presets import PACKAGED
from trainkit.config.schema import SECTIONS, Config, ExtensibleSection, OptimConfig, ScheduleConfig


def library_models() -> list[str]:
    """Names of timm's and torchvision's models."""
    return sorted({*timm_models(), *torchvision_models()})


def json_schema(models: Sequence[str], optimizers: Sequence[str]) -> dict[str, Any]:
    """Schema of a preset: that of `Config`, plus `extends`, the names of plugins, and their options.

    Args:
        models, optimizers: names that libraries have.
    """
    schema = Config.model_json_schema()
    sections = {name: schema["$defs"][model.__name__] for name, model in SECTIONS.items()}
    _describe(Config, schema)
    for name, model in SECTIONS.items():
        _describe(model, sections[name])
    for name in ("model", "data", "task", "strategy"):
        _name_plugins(sections[name], plugins.package_of(f"{name}.name"), models if name == "model" else ())
    _name_ours(sections["optim"], OptimConfig, optimizers, "optimizer_elsewhere")
    _name_ours(sections["schedule"], ScheduleConfig, (), "own")
    executors = ["auto", *plugins.available("trainkit.cluster"), "debug"]
    _name(sections["launch"]["properties"]["executor"], executors, "own")
    _name(sections["monitor"]["properties"]["loggers"]["items"], plugins.available("trainkit.monitor"), "own")
    files = [*PACKAGED.glob("*.yaml"), *PACKAGED.glob("recipes/*.yaml")]
    names = sorted(str(file.relative_to(PACKAGED).with_suffix("")) for file in files)
    about = "A preset to start from, by name or path; this file states only what differs."
    extends = {"description": about, "anyOf": [{"enum": names}, {"type": "string"}]}
    return schema | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "trainkit preset",
        "properties": {"extends": extends, **schema["properties"]},
    }


def _describe(model: type[BaseModel], schema: dict[str, Any]) -> None:
    """Describe each field of a section by the docstring below it.

    pydantic can do this (`use_attribute_docstrings`), but then does it for every command, a tenth of its start.
    """
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            schema["properties"][ast.unparse(before.target)]["description"] = inspect.cleandoc(str(after.value.value))


def _name(field: dict[str, Any], names: Sequence[str], elsewhere: str) -> None:
    """List the names that a field may have, beside those that are elsewhere, as ``json_schema.yaml`` calls that."""
    del field["type"]
    field["anyOf"] = [{"enum": list(names)}, yaml.packaged("json_schema")[elsewhere]]


def _if_named(rule: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"name": rule}, "required": ["name"]}


def _name_plugins(section: dict[str, Any], package: str, others: Sequence[str]) -> None:
    """List the plugins of a section, ``others`` of a library, and the options of whichever is named."""
    names = plugins.available(package)
    common = sorted(section["properties"])
    _name(section["properties"]["name"], [*names, *others], "model_elsewhere" if others else "own")
    rules = []
    for plugin in names:
        signature = plugins.signature(package, plugin)
        rule: dict[str, Any] = {"properties": {option: _option(signature, option) for option in signature.options}}
        if not signature.takes_any:
            rule["propertyNames"] = {"enum": [*common, *signature.options]}
        rules.append({"if": _if_named({"const": plugin}), "then": rule})
    if others:
        told = yaml.packaged("json_schema")
        not_ours = _if_named({"not": {"anyOf": [{"enum": names}, told["own"]]}})
        rules.append({"if": not_ours, "then": {"properties": told["of_a_library"]}})
    section["allOf"] = rules


def _name_ours(section: dict[str, Any], model: type[ExtensibleSection], others: Sequence[str], elsewhere: str) -> None:
    """List the names that a section may have, of which ours have no keys but the section's own."""
    _name(section["properties"]["name"], [*model.OURS, *others], elsewhere)
    own_keys = {"propertyNames": {"enum": sorted(section["properties"])}}
    section["allOf"] = [{"if": _if_named({"not": {"enum": list(model.OURS)}}), "else": own_keys}]


def _option(signature: plugin_options.Signature, option: str) -> dict[str, Any]:
    """An option of a plugin; nothing is said of a type that `trainkit.config.plugins` does not check either."""
    field: dict[str, Any] = {}
    kind = plugin_options.option_type(signature.annotations.get(option, ""))
    if kind is not None:
        field = TypeAdapter(kind).json_schema()
    if option in signature.defaults:
        field["default"] = signature.defaults[option]
    text = _about(signature.doc, option)
    if text:
        field["description"] = text
    return field


def _about(doc: str, option: str) -> str:
    """Return the sentence of a plugin's docstring that names an option, from its name on."""
    for paragraph in re.split(r"\n\s*\n", doc):
        text = " ".join(paragraph.split())
        found = re.search(rf"(?:^|[.;:] )(``{option}(?:=[^`]*)?``)(:)?", text)
        if found and found[2]:
            sentence = _first_sentence(text[found.end(2) :])
            return f"{sentence[:1].upper()}{sentence[1:]}"
        if found:
            return _first_sentence(text[found.start(1) :])
    return str(yaml.packaged("json_schema")["shared"].get(option, ""))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.])\s(?=[A-Z`])", text.strip(), maxsplit=1)[0].replace("``", "")


def text(models: Sequence[str], optimizers: Sequence[str]) -> str:
    """The file's content."""
    return json.dumps(json_schema(models, optimizers), indent=1) + "\n"


@dataclass(frozen=True)
class Setting:
    """One key that a preset or a command line may give."""

    key: str
    type: str
    default: str
    text: str
    of: str = ""
    """The plugins whose option it is; empty for a key that is always there."""

    @property
    def sentence(self) -> str:
        """The first sentence of what is said about it."""
        return re.split(r"(?<=[.])\s", self.text, maxsplit=1)[0]


def settings(section: str | None = None) -> list[Setting]:
    """All settings, or those of a section, in the order in which the configuration has them.

    Raises UserError where there is no such section.
    """
    if section is not None and section not in SECTIONS:
        raise unknown("section", section, list(SECTIONS))
    schema = json_schema((), ())
    found = []
    if section is None:
        found.append(_setting("seed", schema["properties"]["seed"]))
    for name in [section] if section else SECTIONS:
        part = schema["$defs"][SECTIONS[name].__name__]
        found += [_setting(f"{name}.{key}", field) for key, field in part["properties"].items()]
        options: dict[Setting, list[str]] = {}  # one that several plugins share stands once
        for rule in part.get("allOf", ()):
            for key, field in rule.get("then", {}).get("properties", {}).items():
                plugin: str = rule["if"]["properties"]["name"]["const"]
                options.setdefault(_setting(f"{name}.{key}", field), []).append(plugin)
        found += [replace(option, of=", ".join(of)) for option, of in options.items()]
    return found


def _setting(key: str, field: Mapping[str, Any]) -> Setting:
    default = _written(field["default"]) if "default" in field else "(no default)"
    kind = type_in_words(field)
    if key.endswith(".name") or key == "launch.executor":
        kind = "text"
    elif key == "monitor.loggers":
        kind = "[text, ...]"
    return Setting(key, kind, default, " ".join(field.get("description", "").split()))


def _written(value: Any) -> str:
    """A default as it is written on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.stdout.write(text(library_models(), usable_names()))
