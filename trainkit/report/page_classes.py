"""Which class is taken for which, how often each is told right, and the images that were told wrong most surely."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit import fileio, terminal
from trainkit.report.facts import Facts
from trainkit.report.page_markup import NOTHING, Html, join, section, table, tag
from trainkit.report.tables import Row

_MOST_RUNS, _MOST_DRAWN, _MOST_NAMED, _MOST_BARS, _MOST_PAIRS = 4, 100, 30, 20, 10
_MOST_IMAGES, _MOST_OF_ONE, _LARGEST_IMAGE = 48, 8, 1 << 18
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class _Counts:
    """confusion.json, as far as it can be true."""

    names: list[str]
    pairs: dict[tuple[int, int], int]
    where: str

    def per_class(self) -> list[tuple[str, int, int]]:
        """Name, samples, and how many of them were told right, of each class that has any; the worst first."""
        totals, right = [0] * len(self.names), [0] * len(self.names)
        for (label, told), count in self.pairs.items():
            totals[label] += count
            right[label] += count if label == told else 0
        found = [(name, total, good) for name, total, good in zip(self.names, totals, right, strict=True) if total]
        return sorted(found, key=lambda item: item[2] / item[1])


def classes(runs: Sequence[Facts]) -> Html:
    """The sections on classes, and with the gallery."""
    told = [(facts, counts) for facts in runs[:_MOST_RUNS] if (counts := _counts(facts))]
    parts: list[object] = []
    for facts, counts in told:
        if len(runs) > 1:
            parts.append(tag("h3", f"{facts.label}, {counts.where}"))
        left = join([_matrix(counts), _pairs(counts)])
        parts.append(tag("div", tag("div", left), tag("div", _bars(counts)), class_="side"))
    note = f"Of the best weights, on {told[0][1].where}." if len(runs) == 1 and told else "Of the best weights."
    note += f" The first {_MOST_RUNS} runs." * (len(runs) > _MOST_RUNS)
    return join([section("classes", "Classes", *parts, note=note), _gallery(runs)])


def _counts(facts: Facts) -> _Counts | None:
    read = fileio.read_object(facts.run_dir.confusion)
    names = [terminal.one_line(name, 60) for name in _list(read.get("classes"))[:4000]]
    kind = "raw" if _list(read.get("raw")) else "ema"
    pairs: dict[tuple[int, int], int] = {}
    for item in _list(read.get(kind)):
        if isinstance(item, list) and len(item) == 3 and all(fileio.is_whole(value) for value in item):
            label, told, count = item
            if label < len(names) and told < len(names) and count:
                pairs[label, told] = pairs.get((label, told), 0) + count
    if not pairs:
        return None
    where = terminal.one_line(read.get("split", "?"), 20)
    return _Counts(names, pairs, where + _at_step(read))


def _at_step(read: Mapping[str, Any]) -> str:
    return f", step {read['step']}" if fileio.is_whole(read.get("step")) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _matrix(counts: _Counts) -> Html:
    many = len(counts.names)
    if many > _MOST_DRAWN:
        return NOTHING
    named = many <= _MOST_NAMED
    longest = max(len(name) for name in counts.names)
    margin = min(6.5 * min(longest, 14) + 10, 100) if named else 6
    size = (400 - margin) / many
    totals = [0] * many
    for (label, _), count in counts.pairs.items():
        totals[label] += count
    found: list[Html] = []
    if named:
        for at, name in enumerate(counts.names):
            text = name if len(name) <= 14 else name[:13] + "…"
            y = x = margin + (at + 0.5) * size
            found.append(tag("text", text, x=f"{margin - 5:.1f}", y=f"{y:.1f}", dy="0.35em", class_="tick end"))
            turn = f"rotate(-90 {x:.1f} {margin - 5:.1f})" if longest > 2 else None
            style = "tick" if turn else "tick middle"
            found.append(
                tag("text", text, x=f"{x:.1f}", y=f"{margin - 5:.1f}", transform=turn, dy="0.3em" if turn else None,
                    class_=style)
            )  # fmt: skip
    for (label, told), count in sorted(counts.pairs.items()):
        share = count / totals[label]
        right = label == told
        opacity = 0.12 + 0.88 * share if right else min(1.0, 0.3 + 0.7 * share)
        x, y = margin + told * size, margin + label * size
        said = tag("title", _pair(counts, label, told, count, totals[label])) if named else None
        found.append(
            tag("rect", said, x=f"{x:.1f}", y=f"{y:.1f}", width=f"{size:.2f}", height=f"{size:.2f}",
                fill_opacity=f"{opacity:.2f}", class_="right" if right else "wrong")
        )  # fmt: skip
        if size >= 22 and count < 10 ** int(size / 7):
            style = "count over" if opacity > 0.6 else "count"
            x, y = x + size / 2, y + size / 2
            found.append(tag("text", count, x=f"{x:.1f}", y=f"{y:.1f}", dy="0.35em", class_=style))
    edge, corner = f"{400 - margin:.1f}", f"{margin:.1f}"
    found.append(tag("rect", x=corner, y=corner, width=edge, height=edge, class_="frame"))
    wrong = sum(count for (label, told), count in counts.pairs.items() if label != told)
    words = f"Confusion matrix of {many} classes: {wrong} of {sum(totals)} told wrong"
    picture = tag("svg", *found, viewBox="0 0 400 400", role="img", aria_label=words, class_="matrix")
    unit = tag("span", "rows: the class; columns: taken for", class_="unit")
    return tag("figure", tag("figcaption", "Confusion matrix ", unit), picture)


def _pair(counts: _Counts, label: int, told: int, count: int, total: int) -> str:
    name = counts.names[label]
    words = f"{name} told right" if label == told else f"{name} taken for {counts.names[told]}"
    return f"{words}: {count:,} of {total:,}"


def _pairs(counts: _Counts) -> Html:
    totals: dict[int, int] = {}
    for (label, _), count in counts.pairs.items():
        totals[label] = totals.get(label, 0) + count
    wrong = sorted(((c, pair) for pair, c in counts.pairs.items() if pair[0] != pair[1]), key=lambda item: -item[0])
    if not wrong:
        return tag("p", "None was told wrong.", class_="note")
    rows: list[Row] = [
        (counts.names[label], counts.names[told], f"{count:,}", f"{100 * count / totals[label]:.1f} %")
        for count, (label, told) in wrong[:_MOST_PAIRS]
    ]
    return table(("class", "taken for", "times", "of the class"), rows, numbers_from=2, caption="Most often confused")


def _bars(counts: _Counts) -> Html:
    found = counts.per_class()
    shown = found if len(found) <= _MOST_NAMED else found[:_MOST_BARS]
    lines: list[Html] = []
    begins = min(34, 6 + 2 * max((len(name) for name, _, _ in shown), default=0))  # percent of the width
    room = 80 - begins
    for at, (name, total, right) in enumerate(shown):
        y, share = 22 * at, 100 * right / total
        text = name if len(name) <= 16 else name[:15] + "…"
        lines += [
            tag("text", text, x=0, y=y + 14),
            tag("rect", x=f"{begins}%", y=y + 4, width=f"{room}%", height=13, class_="track"),
            tag("rect", x=f"{begins}%", y=y + 4, width=f"{room * share / 100:.2f}%", height=13, class_="part c0"),
            tag("text", f"{share:.1f} %", x="100%", y=y + 14, class_="end"),
        ]
    title = "Accuracy by class" if len(shown) == len(found) else f"The {len(shown)} worst of {len(found)} classes"
    words = "; ".join(f"{name} {100 * right / total:.1f} % of {total}" for name, total, right in shown)
    height, label = 22 * len(shown) + 2, f"{title}: {words}"
    picture = tag("svg", *lines, width="100%", height=height, role="img", aria_label=label, class_="fluid")
    rest = NOTHING
    if len(shown) < len(found):
        rows = [(name, f"{total:,}", f"{100 * right / total:.1f} %") for name, total, right in found]
        whole = table(("class", "images", "told right"), rows, numbers_from=1)
        rest = tag("details", tag("summary", f"All {len(found)} classes"), whole)
    return join(
        [tag("figure", tag("figcaption", title, " ", tag("span", "worst first", class_="unit")), picture), rest]
    )


def _gallery(runs: Sequence[Facts]) -> Html:
    parts: list[object] = []
    for facts in runs[:_MOST_RUNS]:
        for split in ("val", "test"):
            read = fileio.read_object(facts.run_dir.mistakes(split))
            most = _MOST_IMAGES if len(runs) == 1 else _MOST_OF_ONE
            images = [image for item in _list(read.get("images"))[:most] if (image := _image(item))]
            if images or read.get("images") == []:
                where = f"{facts.label}, " * (len(runs) > 1) + split + _at_step(read)
                parts.append(tag("h3", where))
                none = tag("p", "None was told wrong.", class_="note")
                parts.append(tag("div", *images, class_="gallery") if images else none)
    note = "The class that the model was surest of, and was wrong; each with the probability that it gave to it."
    return section("mistakes", "Most confidently wrong", *parts, note=note)


def _image(item: Any) -> Html | None:
    """One image with what it is and what it was taken for; None for what is no small PNG."""
    if not isinstance(item, dict) or not isinstance(png := item.get("png"), str) or len(png) > _LARGEST_IMAGE:
        return None
    try:
        content = base64.b64decode(png, validate=True)
    except (binascii.Error, ValueError):
        return None
    if not content.startswith(_PNG) or len(content) < 33 or not fileio.is_number(item.get("confidence")):
        return None
    label, told = (terminal.one_line(item.get(key, "?"), 60) for key in ("label", "told"))
    large = int.from_bytes(content[16:20], "big") > 40
    words = f"{label}, taken for {told} with {100 * item['confidence']:.1f} %"
    picture = tag("img", src=f"data:image/png;base64,{png}", alt=words, class_="photo" if large else None)
    said = tag("span", label, " ", tag("span", "taken for", class_="muted"), " ", tag("b", told))
    sure = tag("span", f"{100 * item['confidence']:.1f} % sure", class_="muted")
    return tag("figure", picture, tag("figcaption", said, tag("br"), sure))
