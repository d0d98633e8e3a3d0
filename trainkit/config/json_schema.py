"""``python -m trainkit.config.json_schema > configs/schema.json``: JSON schema by which editors complete presets.

It is made at each release, with the names of the timm and torchvision that are installed then: `trainkit.plugins`
reads them from their source, so that neither is imported, nor torch.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from trainkit import plugins
from trainkit.config.loading import PACKAGED
from trainkit.config.optimizers import usable_names
from trainkit.config.schema import SECTIONS, Config, ExtensibleSection, OptimConfig, ScheduleConfig
from trainkit.config.settings import field_docs

OWN = {"type": "string", "pattern": ":", "description": "package.module:function of your own."}
ELSEWHERE = {
    "type": "string",
    "pattern": "[:./]",
    "description": "package.module:function of your own; NAME.TAG for certain weights of timm's; timm/NAME or "
    "torchvision/NAME for one that is newer than this list.",
}
ANY_OPTIMIZER = {
    "type": "string",
    "pattern": "[:/]",
    "description": "package.module:function of your own; timm/NAME or torch/NAME.",
}
FROM_A_LIBRARY = {
    "pretrained": {"type": "boolean", "default": False, "description": "Start from weights that are downloaded."},
    "weights": {"type": "string", "description": "torchvision: which weights, such as IMAGENET1K_V2."},
    "drop_rate": {"type": "number", "description": "timm: dropout before the head."},
    "drop_path_rate": {"type": "number", "description": "timm: stochastic depth."},
}


def library_models() -> list[str]:
    """Names of timm's and torchvision's models."""
    return sorted({*plugins.timm_models(), *plugins.torchvision_models()})


def json_schema(models: Sequence[str], optimizers: Sequence[str]) -> dict[str, Any]:
    """Schema of a preset: that of `Config`, plus `extends`, the names of plugins, and their options.

    Args:
        models, optimizers: see `library_models`.
    """
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "trainkit preset"
    sections: list[type[BaseModel]] = [Config, *SECTIONS.values()]
    for model in sections:
        properties = schema["properties"] if model is Config else schema["$defs"][model.__name__]["properties"]
        for name, text in field_docs(model).items():
            properties[name]["description"] = text
    # What the configuration turns into text may be written as a number: `time: 90`, `sbatch: {nice: 10}`.
    launch = schema["$defs"]["LaunchConfig"]["properties"]
    launch["time"]["type"] = ["string", "integer"]
    launch["mem"]["anyOf"].append({"type": "integer"})
    for options in (launch["sbatch"], launch["srun"]):
        options["additionalProperties"] = {"type": ["string", "number", "boolean", "null"]}
    for section, package in (
        ("ModelConfig", "models"),
        ("DataConfig", "data.datasets"),
        ("TaskConfig", "tasks"),
        ("StrategyConfig", "strategies"),
    ):
        _name_plugins(schema["$defs"][section], f"trainkit.{package}", models if package == "models" else ())
    del launch["executor"]["type"]
    launch["executor"]["anyOf"] = [{"enum": ["auto", *plugins.available("trainkit.schedulers"), "debug"]}, OWN]
    _name_ours(schema["$defs"]["OptimConfig"], OptimConfig, optimizers, ANY_OPTIMIZER)
    _name_ours(schema["$defs"]["ScheduleConfig"], ScheduleConfig, (), OWN)
    loggers = schema["$defs"]["MonitorConfig"]["properties"]["loggers"]
    loggers["items"] = {"anyOf": [{"enum": plugins.available("trainkit.monitor")}, OWN]}
    extends = {
        "description": "A preset to start from, by name or path; this file states only what differs.",
        "anyOf": [{"enum": _presets()}, {"type": "string"}],
    }
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return schema


def _presets() -> list[str]:
    files = [*PACKAGED.glob("*.yaml"), *PACKAGED.glob("recipes/*.yaml")]
    return sorted(str(file.relative_to(PACKAGED).with_suffix("")) for file in files)


def _name_plugins(section: dict[str, Any], package: str, others: Sequence[str]) -> None:
    """Have the section list its plugins' names, and the options of whichever is named.

    Args:
        others: names that a library has.
    """
    names, common = plugins.available(package), sorted(section["properties"])
    name = section["properties"]["name"]
    del name["type"]
    name["anyOf"] = [{"enum": [*names, *others]}, ELSEWHERE if others else OWN]
    rules = []
    for plugin in names:
        signature = plugins.signature(package, plugin)
        options = {
            option: {**_type(signature.annotations.get(option, "")), **_default(signature, option)}
            for option in signature.options
        }
        rule: dict[str, Any] = {"properties": options}
        if not signature.takes_any:
            rule["propertyNames"] = {"enum": [*common, *signature.options]}
        rules.append({"if": _named({"const": plugin}), "then": rule})
    if others:
        rules.append({"if": _named({"not": {"anyOf": [{"enum": names}, OWN]}}), "then": {"properties": FROM_A_LIBRARY}})
    section["allOf"] = rules


def _name_ours(
    section: dict[str, Any], model: type[ExtensibleSection], others: Sequence[str], elsewhere: dict[str, Any]
) -> None:
    """Have the section list its names, of which ours have no keys but the section's own."""
    name, ours = section["properties"]["name"], list(model.OURS)
    del name["type"]
    name["anyOf"] = [{"enum": [*ours, *others]}, elsewhere]
    own_keys = {"propertyNames": {"enum": sorted(section["properties"])}}
    section["allOf"] = [{"if": _named({"not": {"enum": ours}}), "else": own_keys}]


def _named(rule: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"name": rule}, "required": ["name"]}


def _default(signature: plugins.Signature, option: str) -> dict[str, Any]:
    return {"default": signature.defaults[option]} if option in signature.defaults else {}


def _type(annotation: str) -> dict[str, Any]:
    """Of an option's annotation; nothing is said of one that `trainkit.plugins` does not check either."""
    words = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "None": "null"}
    if literal := re.fullmatch(r"Literal\[(.*)\]", annotation):
        return {"enum": list(ast.literal_eval(f"({literal[1]},)"))}
    parts = [part.strip() for part in annotation.split("|")]
    if any(part not in words for part in parts):
        return {}
    return {"type": words[parts[0]] if len(parts) == 1 else [words[part] for part in parts]}


def text(models: Sequence[str], optimizers: Sequence[str]) -> str:
    """The file's content."""
    return json.dumps(json_schema(models, optimizers), indent=1) + "\n"


if __name__ == "__main__":
    print(text(library_models(), usable_names()), end="")
