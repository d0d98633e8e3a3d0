from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.config import json_schema, yaml
from trainkit.config.presets import PACKAGED

SCHEMA = json.loads((PACKAGED / "schema.json").read_text(encoding="utf-8"))
PRESETS = sorted([*PACKAGED.glob("*.yaml"), *PACKAGED.glob("recipes/*.yaml")])


def test_the_schema_in_configs_is_current() -> None:
    """`python -m trainkit.config.json_schema > configs/schema.json` makes it."""
    assert (PACKAGED / "schema.json").read_text(encoding="utf-8") == json_schema.text()


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_valid(preset: Path) -> None:
    assert problems(yaml.read(preset)[0], SCHEMA, preset.name) == []


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_tells_editors_where_the_schema_is(preset: Path) -> None:
    first = preset.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (preset.parent / first.split("=", 1)[1]).resolve() == PACKAGED / "schema.json"


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimm": {}},
        {"optim": {"wieght_decay": 1}},
        {"train": {"epochs": 0}},
        {"train": {"epochs": "x"}},
        {"optim": {"name": "adam"}},
        {"monitor": {"loggers": "console"}},
        {"model": "vit"},
    ],
)
def test_mistakes_are_seen_in_the_editor(wrong: dict[str, Any]) -> None:
    assert problems(wrong, SCHEMA, "file")


@pytest.mark.parametrize("launch", [{"time": 90}, {"mem": 0}, {"sbatch": {"nice": 10, "exclusive": True}}])
def test_what_the_configuration_turns_into_text_may_be_a_number(launch: dict[str, Any]) -> None:
    assert problems({"launch": launch}, SCHEMA, "file") == []


def test_options_of_plugins_are_left_to_the_plugins() -> None:
    assert problems({"model": {"name": "vit", "depth": 3}}, SCHEMA, "file") == []


def test_settings_are_explained() -> None:
    rate = SCHEMA["$defs"]["OptimConfig"]["properties"]["lr"]
    assert rate["description"] == "Peak learning rate."


def problems(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    """What in ``value`` breaks ``schema``; of JSON schema, the words that ours uses."""
    if "$ref" in schema:
        return problems(value, SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]], where)
    if "anyOf" in schema:
        return (
            [] if any(not problems(value, option, where) for option in schema["anyOf"]) else [f"{where}: none of anyOf"]
        )
    found: list[str] = []
    types: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
    wanted = schema.get("type", [])
    wanted = wanted if isinstance(wanted, list) else [wanted]
    fits = "boolean" in wanted if isinstance(value, bool) else any(isinstance(value, types[name]) for name in wanted)
    if wanted and not fits:
        return [f"{where}: {value!r} is no {' or '.join(wanted)}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is none of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{where}: {value!r} is not {schema['const']}")
    if value is not None and not isinstance(value, str | dict | list):
        limits: dict[str, Callable[[float], bool]] = {
            "minimum": lambda limit: value >= limit,
            "exclusiveMinimum": lambda limit: value > limit,
            "exclusiveMaximum": lambda limit: value < limit,
        }
        found += [
            f"{where}: {value} against {name}"
            for name, holds in limits.items()
            if name in schema and not holds(schema[name])
        ]
    if isinstance(value, list):
        items = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        found += [text for item, rule in zip(value, items, strict=True) for text in problems(item, rule, where)]
    if isinstance(value, dict):
        declared, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, item in value.items():
            if key in declared:
                found += problems(item, declared[key], f"{where}.{key}")
            elif others is False:
                found.append(f"{where}.{key}: unknown key")
            elif isinstance(others, dict):
                found += problems(item, others, f"{where}.{key}")
    return found
