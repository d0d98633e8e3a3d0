"""What makes two runs the same: their configuration, their code, their data, and how many ranks train, not where."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trainkit import reading
from trainkit.config.schema import Config
from trainkit.records import index
from trainkit.records.code_archive import code_digest
from trainkit.records.rundir import RunDir

_LOOKED_AT = 1000
"""Entries of a data folder; a folder with more of them is told by its own time of change."""


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """The `code_digest` of files by their names; a link that leads nowhere is no code."""
    content: dict[str, bytes] = {}
    for name, file in files:
        with suppress(OSError):
            content[name] = reading.read_bytes(file, follow=True)
    return code_digest(content)


def fingerprint(config: Config, code: str) -> str:
    """Of a run to be.

    Args:
        config: as the run stores it, with the absolute folder of its data.
        code: its `code_digest`.
    """
    settings = config.model_dump(mode="json", exclude={"launch"})
    ranks = config.launch.model_dump(mode="json", include={"nodes", "gpus_per_node", "ntasks_per_node"})
    text = json.dumps([settings, ranks, code, _data_state(Path(config.data.root))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def same_runs(prints: Iterable[str]) -> dict[str, list[RunDir]]:
    """Runs of this user, by fingerprint, oldest first; those alone that are there still, and are still what they were.

    One file is read, and of each run that is found its manifest.
    """
    wanted = set(prints)
    found: dict[str, list[RunDir]] = {}
    for mark, path in index.marked():
        if mark in wanted and os.path.isfile(path / "config.yaml"):
            run = RunDir(path)
            if reading.read_object(run.manifest).get("fingerprint") == mark:
                found.setdefault(mark, []).append(run)
    return found


def _data_state(root: Path) -> list[list[object]]:
    """What a look into the data's folder shows: names, sizes and times. Nobody has time to read all that is in it."""
    try:
        with os.scandir(root) as entries:
            seen = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
            if len(seen) > _LOOKED_AT:
                return [[len(seen), root.stat().st_mtime_ns]]
            stats = [(entry.name, entry.stat()) for entry in seen]
    except OSError:  # digits and synthetic have none
        return []
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
