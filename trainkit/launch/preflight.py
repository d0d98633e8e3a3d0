"""A check of a job's own nodes, before its ranks start: what it found, and what becomes of the attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit import fileio
from trainkit.run.events import Attempt
from trainkit.site.node_health import findings, table

FILE = "preflight.json"
"""Among the attempt's logs: whatever the ranks of the check print."""
REFUSED = 3
_WORD = "failed preflight: "


def pronounce(attempt: Attempt) -> int:
    """Show what was found; 3, and the attempt has failed, if a node is bad.

    Nodes that gave no answer are not held back: whether the ranks can start there, these say best.
    """
    report = _report(attempt)
    if report is None:
        print("The preflight gave no answer; the ranks are started nevertheless.", flush=True)
        return 0
    found = findings(report)
    print("\n".join(table(report, found)), flush=True)
    bad = [item for item in found if item.bad]
    for item in bad:
        attempt.failed(f"{_WORD}{item.node}: {item.check}: {item.what}", rank=None, host=item.node)
    return REFUSED if bad else 0


def is_preflight(error: str) -> bool:
    """Whether a failure is what `pronounce` has written."""
    return error.startswith(_WORD)


def bad_nodes(attempt: Attempt) -> dict[str, str]:
    """Nodes that the attempt's preflight found bad, and why; none without one."""
    report = _report(attempt)
    found = [item for item in findings(report) if item.bad] if report is not None else []
    return {node: f"{_WORD}{item.check}: {item.what}" for item in reversed(found) for node in item.node.split(",")}


def _report(attempt: Attempt) -> Mapping[str, Any] | None:
    try:
        lines = fileio.read_text(attempt.logs / FILE).splitlines()
        report: Mapping[str, Any] | None = next(
            (fileio.parse(line) for line in lines if line.startswith('{"ranks"')), None
        )
    except (OSError, ValueError):
        return None
    return report
