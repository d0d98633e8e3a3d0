"""Tags and notes that a user gives a run: ``labels.jsonl`` in its folder.

They are no settings, which say what a run is, and no events, which only the run's writer adds: whoever may write into
the folder says them at any time, also while the run goes on. A line adds one or takes one back, so that of two commands
at once none is lost:

    {"time", "tag": "paper"}  {"time", "untag": "paper"}  {"time", "note": "warm-up too short"}  {"time", "unnote": 1}
"""

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.run.folder import RunDir

KEEP = "keep"
"""Runs with this tag are never cleaned away."""
LONGEST_NOTE = 2000
_TAG = re.compile(r"[^\W_][\w.:+-]{0,63}")


class Note(NamedTuple):
    """A sentence or some."""

    number: int
    """From 1, in the order in which notes were made; one that is taken back keeps its number."""
    time: float
    """Seconds since 1970; 0 where that is not known."""
    text: str

    @property
    def day(self) -> str:
        """Date like 2026-11-27, by this machine's clock; empty where it is not known."""
        return f"{datetime.fromtimestamp(self.time):%Y-%m-%d}" if self.time else ""


class Labels(NamedTuple):
    """Present labels of a run."""

    tags: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


NO_LABELS = Labels()


def labels_of(run: RunDir) -> Labels:
    """The tags, in the order of the alphabet, and notes of a run. Raises UserError where they cannot be read."""
    tags = set[str]()
    notes = dict[int, Note]()
    count = 0
    for raw in jsonl.read_jsonl(run.labels):
        tag = raw.get("tag")
        text = raw.get("note")
        if isinstance(tag, str) and _TAG.fullmatch(tag):
            tags.add(tag)
        tags.discard(str(raw.get("untag")))
        if isinstance(text, str):
            count += 1
            when = raw["time"] if jsonl.is_time(raw.get("time")) else 0.0
            notes[count] = Note(count, when, terminal.one_line(text, LONGEST_NOTE))
        if jsonl.is_whole(raw.get("unnote")):
            notes.pop(raw["unnote"], None)
    return Labels(tuple(sorted(tags)), tuple(notes.values()))


def shown_labels(run: RunDir) -> Labels:
    """`labels_of` for whoever only shows them: none where they cannot be read."""
    with suppress(UserError):
        return labels_of(run)
    return NO_LABELS


def tag_of(text: str) -> str:
    """A tag that a user has typed. Raises UserError for one that cannot be typed after ``--tag`` or split by commas."""
    if _TAG.fullmatch(text):
        return text
    why = "A tag has letters, digits and . : + - _, and starts with a letter or a digit."
    fix = f"Write a note instead: `{terminal.command('note', 'RUN', 'TEXT')}`."
    raise UserError(f"{text!r:.80} is not a tag.", why=why, fix=fix)


def note_of(text: str) -> str:
    """A note that a user has typed, as one line.

    Raises:
        UserError: it is empty, or too long.
        RefusedError: it looks like a credential, and whoever follows the run reads it.
    """
    line = " ".join(text.split())
    if not 0 < len(line) <= LONGEST_NOTE:
        why = f"It has 1 to {LONGEST_NOTE:,}."
        raise UserError(f"The note has {len(line):,} characters.", why=why, fix="Write what is to be remembered.")
    from trainkit.run import secrets  # too slow for a list of runs

    found = secrets.find(line, python=False)
    if found:
        why = "Notes are shown in the run's folder, in reports and in loggers."
        raise RefusedError(f"The note looks like a secret ({found[0].kind}).", why=why, fix="Remove that word.")
    return line


def say(run: RunDir, *, tags: Iterable[str] = (), notes: Iterable[str] = ()) -> None:
    """Add tags and notes, as `tag_of` and `note_of` return them. Raises UserError where they cannot be written."""
    there = labels_of(run).tags
    for tag in tags:
        if tag not in there:
            _append(run, "tag", tag)
    for note in notes:
        _append(run, "note", note)


def take_back(run: RunDir, *, tags: Iterable[str] = (), note: int | None = None) -> None:
    """Remove tags, or a note by its number, of which `require_said` knows. Raises UserError: it cannot be written."""
    for tag in tags:
        _append(run, "untag", tag)
    if note is not None:
        _append(run, "unnote", note)


def require_said(run: RunDir, *, tags: Iterable[str] = (), note: int | None = None) -> None:
    """Raise UserError where the run has no such tag or note, or where what is said of it cannot be written."""
    there = labels_of(run)
    for tag in tags:
        if tag not in there.tags:
            why = f"Its tags: {', '.join(there.tags) or 'none'}."
            raise UserError(f"{run.name} has no tag {tag}.", why=why, fix="Give one of these.")
    numbers = [item.number for item in there.notes]
    if note is not None and note not in numbers:
        why = f"Numbers of its notes: {', '.join(map(str, numbers)) or 'none'}."
        fix = f"`{terminal.command('note', run.path)}` lists them."
        raise UserError(f"{run.name} has no note {note}.", why=why, fix=fix)


def _append(run: RunDir, key: str, value: object) -> None:
    with fileio.disk_errors_as(f"Cannot write the labels of {run.name}.", fix="Ask its owner, or free some space."):
        jsonl.append_jsonl(run.labels, {"time": round(time.time(), 3), key: value})
