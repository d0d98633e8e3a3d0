"""``python -m trainkit.config.json_schema > configs/schema.json``: JSON schema by which editors complete presets."""

from __future__ import annotations

import json
from typing import Any

from trainkit.config.schema import Config


def json_schema() -> dict[str, Any]:
    """Schema of a preset: that of `Config`, plus `extends`."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "trainkit preset"
    # What the configuration turns into text may be written as a number: `time: 90`, `sbatch: {nice: 10}`.
    launch = schema["$defs"]["LaunchConfig"]["properties"]
    launch["time"]["type"] = ["string", "integer"]
    launch["mem"]["anyOf"].append({"type": "integer"})
    for options in (launch["sbatch"], launch["srun"]):
        options["additionalProperties"] = {"type": ["string", "number", "boolean", "null"]}
    extends = {"type": "string", "description": "A preset to start from; this file states only what differs."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return schema


def text() -> str:
    """The file's content."""
    return json.dumps(json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
