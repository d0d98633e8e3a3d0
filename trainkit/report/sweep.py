"""The results of a sweep: a row for each run, the best first, and what seeds alone make of a result."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.report.facts import Facts, Runs, collect
from trainkit.report.points import points_of
from trainkit.report.tables import NONE, Row, duration, number
from trainkit.run.folder import run_at

FILE = "results.md"


def sweep_tables(sweep: Path, runs: Runs) -> list[tuple[Row, list[Row]]]:
    """Header and rows of the table of all runs; and, where seeds were swept, of the means over them."""
    points = points_of(sweep)
    found = sorted(collect(runs), key=by_accuracy)
    keys = list(dict.fromkeys(key for point in points.values() for key in point))
    header = ("folder", *keys, "val acc1", "epoch", "test acc1", "training time", "")
    rows = [_row(facts, [points.get(facts.run_dir.path.name, {}).get(key, NONE) for key in keys]) for facts in found]
    tables = [(header, rows)]
    others = [key for key in keys if key != "seed"]
    if len(others) < len(keys):
        groups: dict[tuple[str, ...], list[Facts]] = {}
        for facts in found:
            point = points.get(facts.run_dir.path.name, {})
            groups.setdefault(tuple(point.get(key, NONE) for key in others), []).append(facts)
        ordered = sorted(groups.items(), key=lambda item: -(mean_accuracy(item[1]) or 0.0))
        means = [
            (
                *values,
                str(len(group)),
                spread([best_accuracy(facts) for facts in group]),
                spread([test_accuracy(facts) for facts in group]),
            )
            for values, group in ordered
        ]
        tables.append(((*others, "seeds", "val acc1, mean ± sd", "test acc1, mean ± sd"), means))
    return tables


def write_results(sweep: Path, runs: Runs, out: Path) -> str:
    """Write ``out/results.md``; its text.

    Raises UserError where it cannot be written.
    """
    tables = [
        terminal.markdown_table(header, rows, numbers_from=len(header)) for header, rows in sweep_tables(sweep, runs)
    ]
    text = "\n\n".join(tables) + "\n"
    try:
        fileio.make_folder(out)
        fileio.write(out / FILE, text, run_at(out))
    except OSError as error:
        raise UserError(
            f"Cannot write {out / FILE}.", why=f"{error.strerror}.", fix="Free some space, or check who may write."
        ) from None
    return text


def _row(facts: Facts, values: Sequence[str]) -> Row:
    best = facts.best_val
    seconds = facts.train_seconds
    return (
        facts.run_dir.path.name,
        *values,
        number(best_accuracy(facts), ".2f"),
        number(best.get("epoch") if best else None, ".1f"),
        number(test_accuracy(facts), ".2f"),
        duration(seconds) if seconds is not None else NONE,
        _remark(facts),
    )


def _remark(facts: Facts) -> str:
    if facts.finished:
        return "diverged" if facts.setbacks.diverged else ""
    last: Mapping[str, object] = next(
        (event for event in reversed(facts.events) if event.get("event") in ("failed", "ended")), {}
    )
    if last.get("event") == "failed" or last.get("state") not in (None, "COMPLETED"):
        return str(last.get("state", "FAILED"))
    return f"{facts.steps} steps so far" if facts.begun else "not begun"


def by_accuracy(facts: Facts) -> tuple[bool, float, int]:
    """For sorting: the best by validation first, those without any last."""
    value, name = best_accuracy(facts), facts.run_dir.path.name
    return value is None, -(value or 0.0), int(name) if name.isdecimal() else 0


def mean_accuracy(runs: Sequence[Facts]) -> float | None:
    """The mean of the best validation accuracies, in percent; None where there is none."""
    known = [value for facts in runs if (value := best_accuracy(facts)) is not None]
    return statistics.fmean(known) if known else None


def best_accuracy(facts: Facts) -> float | None:
    """Validation accuracy of the best checkpoint in percent; None where there is none."""
    return _accuracy(facts.best_val)


def test_accuracy(facts: Facts) -> float | None:
    """Test accuracy in percent; None where there is none."""
    return _accuracy(facts.test)


def _accuracy(record: dict[str, object] | None) -> float | None:
    value = record.get("acc1") if record else None
    return float(value) if isinstance(value, int | float) and fileio.is_number(value) else None


def spread(values: Iterable[float | None]) -> str:
    """``91.00 ± 1.41``: mean and standard deviation of those that are known, and of how many where not of all."""
    told = list(values)
    known = [value for value in told if value is not None]
    if not known:
        return NONE
    deviation = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.2f}{deviation}" + (f" (of {len(known)})" if len(known) < len(told) else "")
