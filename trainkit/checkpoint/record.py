"""``state.json``: what a checkpoint says of itself. Parsed into a type of ours, since anybody may have edited it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

LONGEST = 1 << 22
"""Bytes of a ``state.json`` that is read at all."""

_FORMATS = (1, 2)
"""The second one has stems in several files; what holds none is still written as the first."""
_DEEPEST = 16
_INT64 = range(-(2**63), 2**63)
_FILE = re.compile(r"[a-z][a-z0-9_-]{0,63}\.safetensors")
_PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class BrokenCheckpointError(Exception):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class FileFacts:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """The content of a ``state.json``."""

    step: int
    state: Mapping[str, Any]
    """Plain values of whoever trains; bounded, but else as they were given."""
    files: Mapping[str, FileFacts]

    @property
    def stems(self) -> set[str]:
        """What it holds."""
        return {stem_of(name) for name in self.files}

    def files_of(self, stem: str) -> list[str]:
        """Names of the files that hold a stem's tensors: ``model.safetensors``, or one of each rank that wrote some.

        Raises BrokenCheckpointError when there are none.
        """
        names = sorted(name for name in self.files if stem_of(name) == stem)
        if not names:
            raise BrokenCheckpointError(f"it has no {stem}.safetensors")
        return names

    def to_json(self) -> str:
        """The text of the file. A number that is not finite becomes null: JSON has no word for it."""
        files = {name: {"bytes": facts.bytes, "sha256": facts.sha256} for name, facts in self.files.items()}
        sharded = any(stem_of(name) != name.removesuffix(".safetensors") for name in self.files)
        body = {"format": _FORMATS[sharded], "step": self.step, "state": _finite(self.state), "files": files}
        return json.dumps({**body, "sha256": _checksum(body)}, indent=1, allow_nan=False) + "\n"


def file_name(stem: str, index: int, count: int) -> str:
    """Name of a stem's file, or of its ``index``-th of ``count``."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def stem_of(name: str) -> str:
    """What a file of this name holds."""
    stem = name.removesuffix(".safetensors")
    return stem[: part.start()] if (part := _PART.search(stem)) and part.end() == len(stem) else stem


def parse(content: bytes, step: int) -> Record:
    """The record of the checkpoint of ``step``.

    Raises BrokenCheckpointError and says what is wrong with it.
    """
    try:
        body = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"state.json is not readable ({error})") from None
    if not isinstance(body, dict) or "sha256" not in body:
        raise BrokenCheckpointError("state.json has no checksum of its own")
    claimed = body.pop("sha256")
    if not _is_bounded(body):
        raise BrokenCheckpointError("state.json holds numbers without end or lists in lists in lists")
    if claimed != _checksum(body):
        raise BrokenCheckpointError("state.json has been changed: its checksum is another")
    if body.keys() != {"format", "step", "state", "files"} or body["format"] not in _FORMATS:
        raise BrokenCheckpointError("state.json is of another version of trainkit")
    state, files = body["state"], body["files"]
    if type(body["step"]) is not int or body["step"] != step:
        raise BrokenCheckpointError(f"state.json is that of step {body['step']}")
    if not isinstance(state, dict) or not isinstance(files, dict):
        raise BrokenCheckpointError("state.json does not say what it must")
    return Record(step, state, {name: _facts(name, facts) for name, facts in files.items()})


def _facts(name: str, facts: object) -> FileFacts:
    if _FILE.fullmatch(name) is None:  # no folder, no way out of this one
        raise BrokenCheckpointError(f"state.json names a file {name[:80]!r}")
    if isinstance(facts, dict) and facts.keys() == {"bytes", "sha256"}:
        size, digest = facts["bytes"], facts["sha256"]
        if type(size) is int and size >= 0 and isinstance(digest, str) and _SHA256.fullmatch(digest):
            return FileFacts(size, digest)
    raise BrokenCheckpointError(f"state.json does not say what {name} must be")


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_bounded(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return depth < _DEEPEST and all(_is_bounded(item, depth + 1) for item in items)
    if isinstance(value, int):
        return value in _INT64
    return not isinstance(value, float) or math.isfinite(value)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
