"""A run's copy elsewhere (`checkpoint.remote`): what it consists of, and in what order it comes and goes.

    s3://bucket/prefix/RUN/remote.json                  whose it is: a number that the run's folder has, too
                           config.yaml manifest.json plan.json code.tar.gz
                           metrics.jsonl evaluations.jsonl events.jsonl summary.json confusion.json
                           mistakes-*.json
                           checkpoints/step-00001000/   as in the run folder; state.json is sent last
                           pointers.json                what `latest` and `best` name, both whole

A checkpoint whose ``state.json`` is there is complete: it is the last to be sent and the first to be removed. It says
what the other files must be, so that what comes back is compared with what was written.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import reading, terminal
from trainkit.checkpoint import files
from trainkit.checkpoint.record import LONGEST, BrokenCheckpointError, Record, parse
from trainkit.checkpoint.store import AbsentError, Store, StoreError
from trainkit.errors import UserError
from trainkit.records.files import write
from trainkit.records.rundir import RunDir

PLACE, POINTERS, CODE = "remote.json", "pointers.json", "code.tar.gz"
RUN_FILES = ("config.yaml", "manifest.json", "plan.json")
RECORDS = (
    *("metrics.jsonl", "evaluations.jsonl", "events.jsonl", "summary.json", "confusion.json"),
    *("mistakes-val.json", "mistakes-test.json"),
)
_SMALL = 1 << 16
LONGEST_TEXT = 1 << 30
"""Bytes of a record that goes there and comes back."""
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Pointers:
    """Steps that ``latest`` and ``best`` name there."""

    latest: int | None = None
    best: int | None = None

    @property
    def steps(self) -> list[int]:
        """Each once, ``latest`` first."""
        return list(dict.fromkeys(step for step in (self.latest, self.best) if step is not None))

    @classmethod
    def read(cls, store: Store) -> Pointers:
        """None where there are none yet, or they are not readable. Raises StoreError."""
        told = small_object(store, POINTERS)
        found = {name: told.get(name) for name in ("latest", "best")}
        return cls(**{name: step for name, step in found.items() if type(step) is int and 0 <= step < 10**15})

    def write(self, store: Store) -> None:
        """Raises StoreError."""
        store.write(json.dumps({"latest": self.latest, "best": self.best}).encode(), POINTERS)


def folder_of(step: int) -> str:
    """Where a checkpoint is there."""
    return f"checkpoints/{files.path_of(Path(), step).name}"


def record_of(store: Store, step: int) -> Record:
    """What the checkpoint of ``step`` says of itself there.

    Raises:
        StoreError: there is none, or the place does not answer.
        BrokenCheckpointError: it is no whole one.
    """
    return parse(store.read(f"{folder_of(step)}/state.json", limit=LONGEST), step)


def remove_step(store: Store, step: int) -> None:
    """Remove a checkpoint, which is none from the first moment on. Raises StoreError."""
    folder = folder_of(step)
    store.remove(f"{folder}/state.json")
    for name in store.names(folder):
        store.remove(f"{folder}/{name}")
    store.remove_folder(folder)


def claim(remote: str, run: RunDir) -> Store:
    """The place of a run below ``remote``, once it is found to be this run's, writable and readable.

    Raises:
        UserError: it cannot be reached, written or read; or another run is there.
    """
    own = own_place(run)
    url = (
        own["url"] if own and own["url"].startswith(f"{remote.rstrip('/')}/") else f"{remote.rstrip('/')}/{_label(run)}"
    )
    number = own["id"] if own else uuid.uuid4().hex
    content = json.dumps({"id": number, "url": url}).encode()
    store = Store(url)
    try:
        there = small_object(store, PLACE)
        if there and there.get("id") != number:
            raise UserError(
                f"There is another run in {url} already.",
                why="It was not made by this run folder, and would be lost.",
                fix=f"Go on with it: `{terminal.command('resume', url)}`; or give another checkpoint.remote.",
                key="checkpoint.remote",
            )
        store.write(content, PLACE)
        if store.read(PLACE, limit=_SMALL) != content:
            raise StoreError("what was written there does not come back")
    except StoreError as error:
        raise unreachable(url, error) from None
    if own is None or own["url"] != url:
        write(run.path / PLACE, content, run.path)
    return store


def unreachable(url: str, error: StoreError) -> UserError:
    """The error for a place that does not do what it must."""
    return UserError(
        f"{url} cannot be used.",
        why=f"{error}.",
        fix="Check the bucket's name, its region, and the credentials in the environment (AWS_PROFILE or "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; GOOGLE_APPLICATION_CREDENTIALS).",
        key="checkpoint.remote",
    )


def _label(run: RunDir) -> str:
    in_sweep = (run.path.parent / "sweep.json").is_file()
    return f"{run.path.parent.name}/{run.path.name}" if in_sweep else run.path.name


def own_place(run: RunDir) -> dict[str, str] | None:
    try:
        told = reading.parse(reading.read_bytes(run.path / PLACE, _SMALL))
    except (OSError, ValueError):
        return None
    fits = isinstance(told, dict) and isinstance(told.get("url"), str) and _ID.fullmatch(str(told.get("id")))
    return told if fits else None


def small_object(store: Store, name: str) -> Mapping[str, Any]:
    """A small JSON object; empty where there is none."""
    try:
        told = reading.parse(store.read(name, limit=_SMALL))
    except AbsentError:
        return {}
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def is_there(store: Store, record: Record) -> bool:
    """Whether the checkpoint is there whole, as ``record`` describes it. Raises StoreError."""
    try:
        return record_of(store, record.step) == record
    except (AbsentError, BrokenCheckpointError):
        return False
