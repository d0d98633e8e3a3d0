"""A swarm's view as text: tables that fit the terminal, and an object for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trainkit import terminal
from trainkit.records import jsonl
from trainkit.records.contributions import Contribution

if TYPE_CHECKING:
    from trainkit.collaborative.swarm import PeerRow, View

PEERS = ("peer", "role", "round", "parts", "samples", "samples/s", "loss", "up", "down", "seen", "id")
# What a narrow terminal does without, in this order.
_DISPENSABLE_OF_PEERS = ("id", "samples", "seen", "loss", "down", "up", "role", "round", "parts")
LEADERBOARD = ("name", "samples", "share", "rounds", "hours", "bytes", "now")
_DISPENSABLE_OF_LEADERBOARD = ("now", "bytes", "rounds", "share", "hours")
_MOST_SHOWN = 100
# Of a name, on a terminal: whoever calls itself something long would leave no room for what the others do.
_LONGEST_NAME = 24


def status_lines(view: View) -> list[str]:
    """The text of ``status``."""
    state = "running" if view.running else "not running"
    words = [
        f"{view.name}: {state}",
        f"round {view.round}/{view.rounds}",
        f"{len(view.peers)} peer{'s' * (len(view.peers) != 1)}",
    ]
    words += [f"{view.samples_per_sec:,.0f} samples/s"] if view.peers else []
    words += [f"loss {view.loss:.4f}"] if view.loss is not None else []
    acc1, loss = view.val.get("acc1"), view.val.get("loss")
    words += [f"val acc1 {acc1:.2f} %"] if acc1 is not None else [f"val loss {loss:.4f}"] if loss is not None else []
    lines = terminal.wrapped(", ".join(words))
    if view.peers:
        rows = [_peer(row) for row in view.peers[:_MOST_SHOWN]]
        lines += _indented(PEERS, rows, _DISPENSABLE_OF_PEERS)
        if len(view.peers) > _MOST_SHOWN:
            lines.append(f"  {len(view.peers) - _MOST_SHOWN} more peers are not shown; --json has them.")
    if view.history:
        header = ("round", "peers", "train loss", "val loss", "val acc1")
        keys = (("round", "d"), ("peers", "d"), ("train_loss", ".4f"), ("loss", ".4f"), ("acc1", ".2f"))
        rows = [tuple(_cell(record.get(key), spec) for key, spec in keys) for record in view.history]
        lines += _indented(header, rows, ("peers", "train loss"))
    return lines


def leaderboard_lines(view: View) -> list[str]:
    """The text of ``status --leaderboard``: who has contributed how much."""
    if not view.contributions:
        return [f"{view.name}: no contributions yet, or its creator has not said."]
    whole = sum(item.samples for item in view.contributions)
    here = {row.credited for row in view.peers}
    rows = [
        (
            item.name,
            f"{item.samples:,.0f}",
            f"{100 * item.samples / whole:.1f} %" if whole else "-",
            str(item.rounds),
            hours(item),
            terminal.size(item.bytes),
            "training" if item.name in here else "-",
        )
        for item in view.contributions
    ]
    title = f"{view.name}: round {view.round}/{view.rounds}, {whole:,.0f} samples of {len(rows)} contributors"
    return [*terminal.wrapped(title), *_indented(LEADERBOARD, rows, _DISPENSABLE_OF_LEADERBOARD)]


def as_object(view: View) -> dict[str, Any]:
    """What a program may rely on; what is not known is null."""
    plain: dict[str, Any] = jsonl.plain({**asdict(view), "samples_per_sec": view.samples_per_sec})
    return plain


def hours(item: Contribution) -> str:
    """``0.25``"""
    return f"{item.seconds / 3600:,.2f}"


def _peer(row: PeerRow) -> tuple[str, ...]:
    parts = f"{row.parts}/{row.expected}" if row.expected else "alone" if not row.group else f"of {row.group}"
    return (
        row.name,
        row.role,
        str(row.round),
        parts,
        f"{row.samples:,}",
        _cell(row.samples_per_sec, ",.0f"),
        _cell(row.loss, ".4f"),
        terminal.size(row.sent) if row.sent else "-",
        terminal.size(row.received) if row.received else "-",
        f"{terminal.age(row.seconds_ago)} ago",
        f"..{row.peer[-6:]}",
    )


def _indented(header: Sequence[str], rows: Sequence[Sequence[str]], dispensable: Sequence[str]) -> list[str]:
    notes = [row[0] if sys.stdout.isatty() and len(row[0]) > _LONGEST_NAME else "" for row in rows]
    shorter = [
        (f"{row[0][: _LONGEST_NAME - 3]}...", *row[1:]) if note else row for row, note in zip(rows, notes, strict=True)
    ]
    return [f"  {line}" for line in terminal.table(header, shorter, notes, dispensable=dispensable, indent=2)]


def _cell(value: object, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) else "-"
