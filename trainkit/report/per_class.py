"""Sections of tasks with classes: which is taken for which, and the images that were told wrong most confidently."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit import fileio, terminal
from trainkit.report.charts import Bar, Html, Picture, bar_chart, join, tag
from trainkit.report.document import Charts, Fold, Gallery, Heading, Part, Photo, Row, Section, Table, Text
from trainkit.report.facts import Facts

_MOST_RUNS, _MOST_DRAWN, _MOST_NAMED, _MOST_BARS, _MOST_PAIRS = 4, 100, 30, 20, 10
_MOST_IMAGES, _MOST_OF_ONE, _LARGEST_IMAGE = 48, 8, 1 << 18


class _Counts:
    """``confusion.json``, as far as it can be true."""

    def __init__(self, facts: Facts) -> None:
        read = fileio.read_object(facts.run_dir.confusion)
        self.names = [terminal.one_line(name, 60) for name in _list(read.get("classes"))[:4000]]
        self.where = terminal.one_line(read.get("split", "?"), 20) + _at_step(read)
        self.pairs: dict[tuple[int, int], int] = {}
        """(class, what it was taken for) -> how often."""
        self.totals, self.right = [0] * len(self.names), [0] * len(self.names)
        for item in _list(read.get("raw")) or _list(read.get("ema")):
            if not (isinstance(item, list) and len(item) == 3 and all(map(fileio.is_whole, item))):
                continue
            label, told, count = item
            if label < len(self.names) and told < len(self.names) and count:
                self.pairs[label, told] = self.pairs.get((label, told), 0) + count
                self.totals[label] += count
                self.right[label] += count if label == told else 0

    def row(self, label: int, told: int) -> Row:
        count = self.pairs[label, told]
        share = 100 * count / self.totals[label]
        return (self.names[label], self.names[told], f"{count:,}", f"{share:.1f} %")


def classes(runs: Sequence[Facts]) -> Section:
    """Which class is taken for which, and how often each is told right."""
    told = [(facts, counts) for facts in runs[:_MOST_RUNS] if (counts := _Counts(facts)).pairs]
    parts: list[Part] = []
    for facts, counts in told:
        parts += [Heading(f"{facts.label}, {counts.where}")] * (len(runs) > 1)
        wrong = sorted((pair for pair in counts.pairs if pair[0] != pair[1]), key=lambda pair: -counts.pairs[pair])
        rows = [counts.row(*pair) for pair in wrong[:_MOST_PAIRS]]
        found = sorted(
            (right / total, name, total)
            for name, total, right in zip(counts.names, counts.totals, counts.right, strict=True)
            if total
        )
        worst = found if len(found) <= _MOST_NAMED else found[:_MOST_BARS]
        title = "Accuracy by class" if len(worst) == len(found) else f"The {len(worst)} worst of {len(found)} classes"
        bars = [Bar(name, 100 * share, f"{100 * share:.1f} % of {total:,}") for share, name, total in worst]
        parts += [
            Charts("classes", [_matrix(counts), bar_chart(title, "worst first", bars, high=100)], "classes"),
            Table(("class", "taken for", "times", "of the class"), rows, 2, "Most often confused"),
            *[Text(["None was told wrong."])] * (not rows),
        ]
        if len(worst) < len(found):
            every = [(name, f"{total:,}", f"{100 * share:.1f} %") for share, name, total in found]
            parts.append(Fold(f"All {len(found)} classes", [Table(("class", "images", "told right"), every, 1)]))
    note = f"Of the best weights, on {told[0][1].where}." if len(runs) == 1 and told else "Of the best weights."
    note += f" The first {_MOST_RUNS} runs." * (len(runs) > _MOST_RUNS)
    return Section("classes", "Classes", parts, note)


def _at_step(read: Mapping[str, Any]) -> str:
    return f", step {read['step']}" if fileio.is_whole(read.get("step")) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _matrix(counts: _Counts) -> Picture | None:
    many = len(counts.names)
    if many > _MOST_DRAWN:
        return None
    named, longest = many <= _MOST_NAMED, max(map(len, counts.names))
    margin = min(6.5 * min(longest, 14) + 10, 100) if named else 6
    size = (400 - margin) / many
    found: list[Html] = []
    for at, name in enumerate(counts.names if named else ()):
        short, middle, edge = name if len(name) <= 14 else name[:13] + "…", margin + (at + 0.5) * size, margin - 5
        found.append(tag("text", short, x=f"{edge:.1f}", y=f"{middle:.1f}", dy="0.35em", class_="tick end"))
        place = {"class_": "tick middle"}
        if longest > 2:
            place = {"class_": "tick", "dy": "0.3em", "transform": f"rotate(-90 {middle:.1f} {edge:.1f})"}
        found.append(tag("text", short, x=f"{middle:.1f}", y=f"{edge:.1f}", **place))
    for (label, told), count in sorted(counts.pairs.items()):
        share = count / counts.totals[label]
        opacity = 0.12 + 0.88 * share if label == told else 0.3 + 0.7 * share
        name, other, times, _ = counts.row(label, told)
        words = f"{name} {'told right' if label == told else f'taken for {other}'}: {times} of {counts.totals[label]:,}"
        x, y = margin + told * size, margin + label * size
        found.append(
            tag("rect", tag("title", words) if named else None, x=f"{x:.1f}", y=f"{y:.1f}", width=f"{size:.2f}",
                height=f"{size:.2f}", fill_opacity=f"{opacity:.2f}", class_="cell c0" if label == told else "cell c1")
        )  # fmt: skip
        if size >= 22 and count < 10 ** int(size / 7):
            style = "count over" if opacity > 0.6 else "count"
            x, y = x + size / 2, y + size / 2
            found.append(tag("text", count, x=f"{x:.1f}", y=f"{y:.1f}", dy="0.35em", class_=style))
    whole, corner = f"{400 - margin:.1f}", f"{margin:.1f}"
    found.append(tag("rect", x=corner, y=corner, width=whole, height=whole, class_="frame"))
    total = sum(counts.totals)
    words = f"Confusion matrix of {many} classes: {total - sum(counts.right)} of {total} told wrong"
    return Picture("Confusion matrix", "rows: the class; columns: taken for", join(found), words, 400, 400)


def mistakes(runs: Sequence[Facts]) -> Section:
    """The images that were told wrong most confidently."""
    parts: list[Part] = []
    for facts in runs[:_MOST_RUNS]:
        for split in ("val", "test"):
            read = fileio.read_object(facts.run_dir.mistakes(split))
            most = _MOST_IMAGES if len(runs) == 1 else _MOST_OF_ONE
            photos = [photo for item in _list(read.get("images"))[:most] if (photo := _photo(item))]
            if photos or read.get("images") == []:
                parts.append(Heading(f"{facts.label}, " * (len(runs) > 1) + split + _at_step(read)))
                parts.append(Gallery(photos) if photos else Text(["None was told wrong."]))
    note = "The class that the model was surest of, and was wrong; each with the probability that it gave to it."
    return Section("mistakes", "Most confidently wrong", parts, note)


def _photo(item: Any) -> Photo | None:
    """One image with what it is and what it was taken for; None for what is no small PNG."""
    if not isinstance(item, dict) or not isinstance(png := item.get("png"), str) or len(png) > _LARGEST_IMAGE:
        return None
    try:
        content = base64.b64decode(png, validate=True)
    except (binascii.Error, ValueError):
        return None
    if not content.startswith(b"\x89PNG\r\n\x1a\n") or len(content) < 33:
        return None
    if not fileio.is_number(item.get("confidence")):
        return None
    label, told = (terminal.one_line(item.get(key, "?"), 60) for key in ("label", "told"))
    return Photo(png, label, told, item["confidence"], int.from_bytes(content[16:20], "big") > 40)
