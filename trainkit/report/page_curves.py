"""The curves of one run, train and val in two colours; or of several, each in its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from trainkit import fileio
from trainkit.report.facts import Facts
from trainkit.report.page_chart import COLOURS, Axes, Series, line_chart
from trainkit.report.page_markup import NOTHING, Html, section, tag
from trainkit.report.page_scales import Point
from trainkit.report.sweep import by_accuracy
from trainkit.report.tables import speed_spec

MOST = COLOURS
"""Runs that are overlaid: nobody tells more colours apart."""
_NAMES = {"lr": "lr", "images_per_sec": "images/s"}
_CURVES = (
    ("loss", "Loss", "cross-entropy", ("train", "val")),
    ("acc1", "Top-1 accuracy", "%", ("train", "val")),
    ("acc5", "Top-5 accuracy", "%", ("train", "val")),
    ("lr", "Learning rate", "", ("train",)),
    ("images_per_sec", "Throughput", "images/s", ("train",)),
)


def curves(runs: Sequence[Facts]) -> Html:
    """The section with the curves."""
    known = [facts for facts in runs if facts.train or facts.val]
    shown = known if len(known) <= MOST else sorted(known, key=by_accuracy)[:MOST]
    records = {facts.label: {"train": facts.drawn, "val": facts.val} for facts in shown}
    every = [record for splits in records.values() for found in splits.values() for record in found]
    by = "epoch" if any("epoch" in record for record in every) else "step"
    x_to = max((record[by] for record in every if by in record), default=1.0)
    marks = [(x, colour if len(shown) > 1 else 7) for colour, f in enumerate(shown) for x in _restarts(f, by)]
    charts = []
    for key, title, unit, splits in _CURVES:
        series = [
            item
            for colour, facts in enumerate(shown)
            for split in splits
            if (item := _series(records[facts.label][split], by, key, split, facts.label, colour, len(shown))).points
        ]
        if not any(item.label for item in series):  # of runs that were never validated
            series = [replace(item, faint=False, label=_end_value(key, item.points)) for item in series]
        axes = Axes(
            title, unit, by, "curves", low=0.0 if key in ("lr", "images_per_sec") else None,
            may_be_log=key == "loss", lost="not finite" if key == "loss" else "",
        )  # fmt: skip
        charts.append(line_chart(axes, series, x_from=0.0, x_to=x_to, marks=marks))
    if not any(charts):
        return NOTHING
    notes = ["Dotted lines: a later attempt went on."] if marks else []
    if len(shown) > 1 and any(facts.val for facts in shown):
        notes.insert(0, "Thick: validation. Thin: training.")
    if any(facts.metrics.every > 1 for facts in shown):
        notes.append(
            "Of an enormous record so many train lines are drawn as a curve can show: evenly spread ones, and of each "
            "stretch those with the largest and the smallest loss, and the first that is no number."
        )
    if len(known) > MOST:
        notes.append(f"The best {MOST} of {len(known)} runs, by validation.")
    return section("curves", "Curves", _legend(shown), tag("div", *charts, class_="charts"), note=" ".join(notes))


def _legend(runs: Sequence[Facts]) -> Html | None:
    if len(runs) < 2:
        return None
    items = [tag("li", tag("span", class_=f"swatch c{colour}"), facts.label) for colour, facts in enumerate(runs)]
    return tag("ul", *items, class_="legend", aria_label="runs and their colours")


def _series(
    records: Sequence[dict[str, Any]], by: str, key: str, split: str, label: str, colour: int, runs: int
) -> Series:
    placed = [record for record in records if fileio.is_number(record.get(by))]
    points = [(float(record[by]), float(record[key])) for record in placed if fileio.is_number(record.get(key))]
    lost = [float(record[by]) for record in placed if key in record and record[key] is None]
    one = runs == 1
    end = _end_value(key, points) if points else ""
    has_val = key in ("loss", "acc1", "acc5")
    return Series(
        name=(split if has_val else _NAMES[key]) if one else f"{label} {split}" if has_val else label,
        points=points,
        colour=(0 if split == "train" else 1) if one else colour,
        faint=not one and has_val and split == "train",
        label=(f"{split} {end}" if has_val else end) if one else end if split == "val" or not has_val else "",
        lost=lost if len(lost) < len(placed) else [],
    )


def _end_value(key: str, points: Sequence[Point]) -> str:
    value = points[-1][1]
    if key == "lr":
        return f"peak {max(y for _, y in points):.3g}"
    if key == "images_per_sec":
        usual = median(y for _, y in points)
        return f"median {usual:{speed_spec(usual)}}"
    return f"{value:.1f}" if key in ("acc1", "acc5") else f"{value:.3g}"


def _restarts(facts: Facts, by: str) -> list[float]:
    if by == "epoch":
        return facts.restarted_at
    return [float(e["step"]) for e in facts.events if e.get("event") == "started" and e.get("step")]
