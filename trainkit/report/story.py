"""What a run was asked to do, where it ran, and in which attempts: rows of the log book."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import Any

from trainkit import terminal
from trainkit.config.loading import flatten, load
from trainkit.errors import TrainkitError
from trainkit.ranks.env import fold
from trainkit.report.facts import Facts
from trainkit.report.spans import spans
from trainkit.report.tables import NONE, Row, duration

_NOT_OF_THE_TRAINING = ("launch.", "monitor.", "collaborative.initial_peers", "data.root")
_MOST_SHOWN = 200


def asked(facts: Facts) -> tuple[str, str]:
    """The command that made the run, and the preset that it names; empty where that is not known."""
    words = _command(facts)
    names = [word for word in words[3:] if not word.startswith("-") and "=" not in word]
    return shlex.join(words), next((name for name in names if _preset(name) is not None), "")


def given(facts: Facts) -> dict[str, str]:
    """Settings that the command, or the sweep for this very run, gave: key and value as they were written."""
    found = _command(facts)
    of_flags = {word for before, word in pairwise(found) if before.startswith("-")}  # --sweep optim.lr=1e-3,3e-3
    pairs = (word.partition("=") for word in found if re.match(r"[a-z_.]+=", word) and word not in of_flags)
    return {key: value for key, _, value in pairs} | facts.point


def _command(facts: Facts) -> list[str]:
    words = facts.manifest.get("command")
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []


CHANGED = ("setting", "this run", "the preset")


def changed_rows(facts: Facts) -> list[Row]:
    """Settings that differ from the preset, or were given; the columns are those of `CHANGED`."""
    own = dict(flatten(facts.config))
    preset = asked(facts)[1]
    theirs = _preset(preset) if preset else None
    keys = [key for key in own if theirs is not None and own[key] != theirs.get(key)]
    # Of a mapping that was given its parts are settings.
    keys += [key for key in given(facts) if not any(name.startswith(f"{key}.") for name in own)]
    keys = [key for key in dict.fromkeys(keys) if not key.startswith(_NOT_OF_THE_TRAINING)]
    rows: list[Row] = [(key, _text(own.get(key)), NONE if theirs is None else _text(theirs.get(key))) for key in keys]
    return rows[:_MOST_SHOWN]


@cache
def _preset(name: str) -> dict[str, Any] | None:
    """The settings of a preset as it is now; None where it cannot be read here."""
    try:
        return dict(flatten(load(name).config.model_dump(mode="json")))
    except (TrainkitError, OSError):  # the user's own, in another folder
        return None


def where_rows(facts: Facts) -> list[Row]:
    """Nodes, GPUs, jobs, software."""
    hosts = [host for host in facts.started("hosts") or () if isinstance(host, str)]
    nodes, device = facts.count("launch.nodes"), facts.started("device")
    simulated = f"{nodes} simulated on one machine: " if is_simulated(facts) else ""
    jobs = [event for event in facts.events if event.get("event") == "submitted"]
    ids = ", ".join(dict.fromkeys(f"{event.get('executor', '?')} {event.get('job_id', '?')}" for event in jobs))
    packages = facts.manifest.get("packages")
    versions = {"Python": facts.manifest.get("python"), **(packages if isinstance(packages, Mapping) else {})}
    versions |= found if isinstance(found := facts.started("versions"), Mapping) else {}
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if isinstance(version, str))
    rows = [
        ("nodes", f"{simulated}{fold(hosts)}" if hosts else NONE),
        ("GPUs", _gpus(facts, device) if isinstance(device, str) else NONE),
        ("job", ids or NONE),
        ("submitted from", f"{facts.manifest['host']}" if isinstance(facts.manifest.get("host"), str) else NONE),
        ("system", _text(facts.manifest.get("platform"))),
        ("software", software or NONE),
    ]
    return [row for row in rows if row[1] != NONE]


def is_simulated(facts: Facts) -> bool:
    """Whether several nodes were one machine."""
    hosts, nodes = facts.started("hosts"), facts.setting("launch.nodes")
    return isinstance(hosts, list) and len(hosts) == 1 and isinstance(nodes, int) and nodes > 1


def _gpus(facts: Facts, device: str) -> str:
    if device == "cpu":
        return "none: trained on the CPU"
    return f"{facts.processors or '?'} of {device}"


ATTEMPTS = ("attempt", "began", "on", "ranks", "steps", "time", "ended")


def attempts_rows(facts: Facts) -> list[Row]:
    """One row an attempt; the columns are those of `ATTEMPTS`."""
    return [
        (
            str(span.number),
            f"{datetime.fromtimestamp(span.began).astimezone():%Y-%m-%d %H:%M:%S}",
            fold(span.hosts) if span.hosts else NONE,
            _text(span.ranks),
            f"{span.from_step} to {span.to_step}",
            duration(span.seconds),
            terminal.one_line(span.how, 200) or "killed without a word, or goes on",
        )
        for span in spans(facts)[-_MOST_SHOWN:]
    ]


def _text(value: Any) -> str:
    if value is None:
        return NONE
    return terminal.one_line(value)
