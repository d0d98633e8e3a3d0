"""``python -m jobs.evaluate RUN``: metrics of a checkpoint on the test split."""

import csv
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import cli
from trainkit.errors import UserError
from trainkit.fileio import append_jsonl, finite
from trainkit.run.folder import RunDir, is_url
from trainkit.terminal import cell, long_line, one_line

if TYPE_CHECKING:
    from trainkit.inference import Evaluation

_SHOWN = 5
_PROBES = {"knn_acc1": "20 nearest neighbours", "linear_acc1": "linear probe"}
_WHOSE = {"raw": "", "ema": " (averaged weights)"}


def parser() -> cli.Parser:
    parser = cli.Parser("evaluate", __doc__).taking("run", "overrides", "--checkpoint", "--allow-code")
    add = parser.add_argument
    add("--split", default="test", choices=("train", "val", "test"), help="on which data (default: test)")
    weights = "the model's own, the averaged ones (train.ema_decay) or both (default: all that there are)"
    add("--weights", choices=("raw", "ema", "both"), help=weights)
    folder = "on images in folders that are called as the classes, in place of the run's data"
    add("--data", metavar="FOLDER", help=folder)
    add("--knn", action="store_true", help="classify by the nearest training images, by features before the last layer")
    add("--linear-probe", action="store_true", help="classify by logistic regression on these features")
    add("--per-class", action="store_true", help="precision, recall and F1 of every class")
    add("--confusion", metavar="FILE.csv", help="write how many images of each class were taken for which")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Parse, evaluate, print."""
    args = parser().parse_intermixed_args(argv)
    from trainkit.config.components import metrics_of

    with cli.run_to_read(args.run, env) as run:
        config = cli.settings_to_read(run, args)
        from trainkit.inference import evaluate_checkpoint

        folder = Path(args.data).expanduser() if args.data else None
        probes = [name for name, asked in zip(_PROBES, (args.knn, args.linear_probe), strict=True) if asked]
        done = evaluate_checkpoint(config, run, args.checkpoint, args.split, args.weights, folder, probes)
        if not is_url(args.run):
            settings = [*args.overrides, *([f"--data {folder}"] if folder else [])]
            _record(run, {"split": args.split, "checkpoint": done.which, "settings": settings}, done)
    from trainkit.tasks.meter import class_scores, confusion_json

    metrics, counts, made_up = done.found.metrics, done.found.counts, config.data.fake and not args.data
    confusion = confusion_json(done.info, counts)
    names = confusion["classes"]
    scores = {kind: class_scores(each, names) for kind, each in counts.items()}
    if args.confusion:
        _write_confusion(args.confusion, confusion)
    if args.json:
        told = {"run": str(run.path), "split": args.split, "step": done.step, **metrics, "classes": names}
        told |= {"made_up": True} if made_up else {}
        told |= {"ece": done.found.ece, "confusion": {kind: confusion[kind] for kind in counts}}
        told |= {"per_class": {kind: [row._asdict() for row in rows] for kind, rows in scores.items()}}
        print(json.dumps(finite(told), allow_nan=False))
        return
    known = metrics_of(config.task.name)
    for prefix, words in (("", ""), ("ema_", "averaged weights: ")):
        if measured := [name for name in (*list(known.metrics)[1:], "loss") if f"{prefix}{name}" in metrics]:
            values = "  ".join(known.words(name, metrics[f"{prefix}{name}"]) for name in measured)
            of = f"{'made-up images, ' * made_up}{one_line(args.data) if args.data else args.split}"
            place = f"{of} of step {done.step} ({done.which})"
            print(f"{place}: {words}{values}  over {metrics['samples']:,.0f} images")
        probed = {how: metrics[f"{prefix}{name}"] for name, how in _PROBES.items() if f"{prefix}{name}" in metrics}
        if probed:
            values = "  ".join(f"{how} acc1 {value:.2f} %" for how, value in probed.items())
            print(f"features before the last layer: {words}{values}")
    for kind, rows in scores.items():
        if rows:
            ece = f"  ECE {done.found.ece[kind]:.2f} %" if kind in done.found.ece else ""
            print(f"macro F1{_WHOSE[kind]} {sum(row.f1 for row in rows) / len(rows):.2f} %{ece}")
    for kind, each in counts.items():
        print(*_worst_classes(each, names, _WHOSE[kind]), sep="\n")
        if args.per_class:
            print(f"each class{_WHOSE[kind]}: precision, recall, F1 in %, images")
            for name, precision, recall, f1, images in scores[kind]:
                print(f"{precision:6.2f} {recall:6.2f} {f1:6.2f} {images:>7,}  {one_line(name)}")


def _write_confusion(file: str, confusion: Mapping[str, Any]) -> None:
    """A row for each class, a column for each that its images were taken for; of the averaged weights, if any."""
    names = confusion["classes"]
    counts = {(label, told): count for label, told, count in confusion.get("ema") or confusion.get("raw") or ()}
    if not counts:
        why = "The task takes no image for one class, or there are too many classes."
        raise UserError("There is no confusion matrix.", why=why, fix="Leave --confusion out.")
    with cli.opened_table(file, "--confusion") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(["class", *map(cell, names)])
        for label, name in enumerate(names):
            table.writerow([cell(name), *(counts.get((label, told), 0) for told in range(len(names)))])


def _record(run: RunDir, of: dict[str, Any], done: "Evaluation") -> None:
    record = {"time": round(time.time(), 3), **of, "step": done.step, **done.found.metrics}
    try:
        append_jsonl(run.evaluations, record)
    except (OSError, UserError) as error:  # another user's run, or an archive: the result is still printed
        why = error.what if isinstance(error, UserError) else f"{error.strerror}."
        print(long_line(f"Not recorded in {run.evaluations}: {why}"), file=sys.stderr)


def _worst_classes(pairs: Mapping[tuple[int, int], int], names: Sequence[str], whose: str) -> list[str]:
    """Table of the classes with the lowest accuracy, worst first, and what they were most often taken for."""
    told: dict[int, Counter[int]] = defaultdict(Counter)
    for (label, other), count in pairs.items():
        told[label][other] = count
    rows: list[tuple[float, str]] = []
    for label, others in told.items():
        total, right = others.total(), others.pop(label, 0)
        if others:
            other, count = max(others.items(), key=lambda item: (item[1], -item[0]))
            share, name, taken = right / total, one_line(names[label]), one_line(names[other])
            words = f"{100 * share:6.2f} %  {right:>6,} of {total:<6,}  {name}, taken for {taken} {count:,} times"
            rows.append((share, words))
    rows.sort(key=lambda row: row[0])
    return [f"worst classes{whose}:", *(line for _, line in rows[:_SHOWN])] if rows else []


if __name__ == "__main__":
    cli.run(main)
