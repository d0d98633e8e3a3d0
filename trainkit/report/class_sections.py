"""Sections on classes: which is taken for which, and the images that were told wrong most confidently."""

import base64
from collections.abc import Sequence
from itertools import product
from typing import Any

from trainkit.common import fileio, jsonl, terminal
from trainkit.report.charts import WIDTH, Bar, Picture, bar_chart, svg_of
from trainkit.report.collection import best_of
from trainkit.report.document import Charts, Fold, Gallery, Heading, Part, ReportRow, ReportSection, Table, Text
from trainkit.report.facts import Facts
from trainkit.report.values import list_of
from trainkit.run.metrics import TakenFor, confusion_of, evaluation_of

_MOST_RUNS = 4
"""Runs whose classes and mistakes are shown."""
_MOST_NAMED = 30
"""Classes of a matrix."""
_MOST_BARS = 20
_MOST_PAIRS = 10
_MOST_IMAGES = 48
_MOST_OF_ONE = 8
"""Images of each run, where there are several."""
_LARGEST_IMAGE = 1 << 18


class _Counts:
    """`TakenFor` with the totals of its rows."""

    def __init__(self, read: TakenFor) -> None:
        self.names = [terminal.one_line(name, 60) for name in read.classes]
        self.pairs = read.counts
        self.right = [self.pairs[label, label] for label in range(len(self.names))]
        self.totals = [0] * len(self.names)
        for (label, _), count in self.pairs.items():
            self.totals[label] += count


def classes(runs: Sequence[Facts]) -> ReportSection:
    """Show which class is taken for which, and how often each is told right."""
    parts: list[Part] = []
    for facts in best_of(runs, _MOST_RUNS):
        read = confusion_of(facts.run_dir)
        if read.counts:
            parts += [_heading(runs, facts, read.evaluation), *_classes_of(_Counts(read))]
    note = "Of the best weights."
    if len(runs) > _MOST_RUNS:
        note += f" The best {_MOST_RUNS} of {len(runs)} runs, by validation."
    return ReportSection("classes", "Classes", parts, note)


def _heading(runs: Sequence[Facts], facts: Facts, evaluation: str) -> Heading:
    """Name the evaluation, and the run where there are several."""
    return Heading(f"{facts.label}, {evaluation}" if len(runs) > 1 else evaluation)


def _classes_of(counts: _Counts) -> list[Part]:
    names = counts.names
    confused: list[ReportRow] = []
    for (label, other), times in counts.pairs.most_common():
        if label != other and len(confused) < _MOST_PAIRS:
            share = 100 * times / counts.totals[label]
            confused.append((names[label], names[other], f"{times:,}", f"{share:.1f} %"))
    accuracies = []
    for name, total, right in zip(names, counts.totals, counts.right, strict=True):
        if total:
            accuracies.append((100 * right / total, name, total))
    bars = []
    rows: list[ReportRow] = []
    for share, name, total in sorted(accuracies):
        bars.append(Bar(name, share, f"{share:.1f} % of {total:,}"))
        rows.append((name, f"{total:,}", f"{share:.1f} %"))
    title = "Accuracy by class"
    folded: list[Part] = []
    if len(bars) > _MOST_NAMED:
        title = f"The {_MOST_BARS} worst of {len(bars)} classes"
        folded = [Fold(f"All {len(bars)} classes", [Table(("class", "images", "told right"), rows, 1)])]
        del bars[_MOST_BARS:]
    pictures = [_matrix(counts), bar_chart(title, "worst first", bars, high=100)]
    pairs = Table(("class", "taken for", "times", "of the class"), confused, 2, "Most often confused")
    return [Charts("classes", pictures, "classes"), pairs or Text(["None was told wrong."]), *folded]


def _matrix(counts: _Counts) -> Picture | None:
    names = counts.names
    if len(names) > _MOST_NAMED:
        return None
    margin = min(6.5 * max(map(len, names)) + 10, 100)
    cells = []
    for (label, told), count in sorted(counts.pairs.items()):
        taken = "told right" if label == told else f"taken for {names[told]}"
        words = f"{names[label]} {taken}: {count:,} of {counts.totals[label]:,}"
        cells.append((label, told, count, count / counts.totals[label], words))
    size = (WIDTH - margin) / len(names)
    body = svg_of("matrix", names=names, margin=margin, size=size, cells=cells, width=WIDTH)
    total = sum(counts.totals)
    words = f"Confusion matrix of {len(names)} classes: {total - sum(counts.right)} of {total} told wrong"
    return Picture("Confusion matrix", "rows: the class; columns: taken for", body, words, WIDTH, WIDTH)


def mistakes(runs: Sequence[Facts]) -> ReportSection:
    """Images that were told wrong most confidently."""
    parts: list[Part] = []
    most = _MOST_OF_ONE
    if len(runs) == 1:
        most = _MOST_IMAGES
    for facts, split in product(best_of(runs, _MOST_RUNS), ("val", "test")):
        read = fileio.read_object(facts.run_dir.mistakes(split))
        pngs = []
        rows = []
        for item in list_of(read.get("images"))[:most]:
            photo = _photo(item)
            if photo is not None:
                pngs.append(photo[0])
                rows.append(photo[1])
        if pngs or read.get("images") == []:
            gallery = Gallery(pngs, Table(("class", "taken for", "sure"), rows, 2))
            parts.append(_heading(runs, facts, evaluation_of({**read, "split": split})))
            parts.append(gallery if pngs else Text(["None was told wrong."]))
    note = "The class that the model was surest of, and was wrong; each with the probability that it gave to it."
    return ReportSection("mistakes", "Most confidently wrong", parts, note)


def _photo(item: Any) -> tuple[str, ReportRow] | None:
    """One image, and its row; None for what is no small PNG."""
    if not isinstance(item, dict):
        return None
    png = item.get("png")
    if not isinstance(png, str) or len(png) > _LARGEST_IMAGE:
        return None
    try:
        content = base64.b64decode(png, validate=True)
    except ValueError:
        return None
    if not content.startswith(b"\x89PNG\r\n\x1a\n") or not jsonl.is_number(item.get("confidence")):
        return None
    label = terminal.one_line(item.get("label", "?"), 60)
    told = terminal.one_line(item.get("told", "?"), 60)
    return png, (label, told, f"{100 * item['confidence']:.1f} %")
