"""``python -m trainkit.config.json_schema > configs/schema.json``: JSON schema by which editors complete presets."""

from __future__ import annotations

import ast
import inspect
import json
from typing import Any

from pydantic import BaseModel

from trainkit.config.schema import SECTIONS, Config


def json_schema() -> dict[str, Any]:
    """Schema of a preset: that of `Config`, plus `extends`."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "trainkit preset"
    models: list[type[BaseModel]] = [Config, *SECTIONS.values()]
    for model in models:
        properties = schema["properties"] if model is Config else schema["$defs"][model.__name__]["properties"]
        for name, text in field_docs(model).items():
            properties[name]["description"] = text
    # What the configuration turns into text may be written as a number: `time: 90`, `sbatch: {nice: 10}`.
    launch = schema["$defs"]["LaunchConfig"]["properties"]
    launch["time"]["type"] = ["string", "integer"]
    launch["mem"]["anyOf"].append({"type": "integer"})
    for options in (launch["sbatch"], launch["srun"]):
        options["additionalProperties"] = {"type": ["string", "number", "boolean", "null"]}
    extends = {"type": "string", "description": "A preset to start from; this file states only what differs."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return schema


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of a section.

    pydantic can do this (`use_attribute_docstrings`), but then does it for every command, a tenth of its start.
    """
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        before.target.id: inspect.cleandoc(after.value.value)
        for before, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def text() -> str:
    """The file's content."""
    return json.dumps(json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
