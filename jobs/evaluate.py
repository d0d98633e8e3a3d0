"""``python -m jobs.evaluate RUN``: compute the metrics of a checkpoint on the test split."""

import csv
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from jobs import cli, output
from trainkit.common.errors import UserError
from trainkit.common.jsonl import append_jsonl
from trainkit.common.terminal import cell, long_line, one_line
from trainkit.run.find import is_url
from trainkit.run.folder import RunDir

if TYPE_CHECKING:
    from trainkit.config.task_metrics import TaskMetrics
    from trainkit.inference.evaluate import Evaluation

_SHOWN = 5
_PROBES = {"knn_acc1": "20 nearest neighbours", "linear_acc1": "linear probe"}
_WHOSE = {"raw": "", "ema": " (averaged weights)"}


def parser() -> cli.Parser:
    parser = cli.Parser("evaluate", __doc__).taking("run", "overrides", "--checkpoint", "--allow-code", "--json")
    add = parser.add_argument
    add("--split", default="test", choices=("train", "val", "test"), help="the split to evaluate on (default: test)")
    weights = "the model's own weights, the averaged ones (train.ema_decay), or both (default: all that exist)"
    add("--weights", choices=("raw", "ema", "both"), help=weights)
    folder = "evaluate on images in folders named like the classes, instead of the run's data"
    add("--data", metavar="FOLDER", help=folder)
    add("--knn", action="store_true", help="classify by nearest training images, on features before the last layer")
    add("--linear-probe", action="store_true", help="classify by logistic regression on these features")
    add("--per-class", action="store_true", help="precision, recall and F1 of every class")
    add("--confusion", metavar="FILE.csv", help="write the confusion matrix as CSV")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Parse, evaluate, print."""
    args = parser().parse_intermixed_args(argv)
    from trainkit.config.task_metrics import metrics_of

    with cli.run_to_read(args.run, env) as run:
        config = cli.settings_to_read(run, args, "evaluate")
        from trainkit.inference.evaluate import evaluate_checkpoint, require_confusion
        from trainkit.training.tasks.meter import class_scores, confusion_json

        if args.confusion:
            cli.require_table(args.confusion, "--confusion")
            require_confusion(config, run, args.checkpoint)
        settings = list(args.overrides)
        folder = None
        if args.data:
            folder = Path(args.data).expanduser()
            settings.append(f"--data {folder}")
        probes = []
        if args.knn:
            probes.append("knn_acc1")
        if args.linear_probe:
            probes.append("linear_acc1")
        done = evaluate_checkpoint(config, run, args.checkpoint, args.split, args.weights, folder, probes)
        confusion = confusion_json(done.info, done.found.counts)
        if args.confusion:
            _write_confusion(args.confusion, confusion)
        if not is_url(args.run):
            _record(run, {"split": args.split, "checkpoint": done.which, "settings": settings}, done)
    made_up = config.data.fake and not args.data
    names = confusion["classes"]
    scores = {kind: class_scores(each, names) for kind, each in done.found.counts.items()}
    if args.json:
        told = {"run": str(run.path), "split": args.split, "step": done.step, **done.found.metrics, "classes": names}
        if made_up:
            told["made_up"] = True
        told["ece"] = done.found.ece
        told["confusion"] = {kind: confusion[kind] for kind in scores}
        told["per_class"] = {kind: [row._asdict() for row in rows] for kind, rows in scores.items()}
        from jobs.measured_shapes import Evaluated

        output.emit(Evaluated.model_validate(told), a_line=True)
        return
    images = one_line(args.data or args.split)
    if made_up:
        images = f"made-up images, {images}"
    place = f"{images} of step {done.step} ({done.which})"
    for line in _lines(metrics_of(config.task.name), done.found.metrics, place):
        print(line)
    for kind, rows in scores.items():
        if rows:
            line = f"macro F1{_WHOSE[kind]} {mean(row.f1 for row in rows):.2f} %"
            if kind in done.found.ece:
                line += f"  ECE {done.found.ece[kind]:.2f} %"
            print(line)
    for kind, rows in scores.items():
        print(*_worst_classes(done.found.counts[kind], names, _WHOSE[kind]), sep="\n")
        if args.per_class:
            print(f"each class{_WHOSE[kind]}: precision, recall, F1 in %, images")
            for name, precision, recall, f1, count in rows:
                print(f"{precision:6.2f} {recall:6.2f} {f1:6.2f} {count:>7,}  {one_line(name)}")


def _lines(known: "TaskMetrics", metrics: Mapping[str, float], place: str) -> Iterator[str]:
    """Metrics in words, of the model's own weights and of the averaged ones."""
    for prefix, words in (("", ""), ("ema_", "averaged weights: ")):
        values: list[str] = []
        for name in [*list(known.metrics)[1:], "loss"]:
            if f"{prefix}{name}" in metrics:
                values.append(known.words(name, metrics[f"{prefix}{name}"]))
        if values:
            yield f"{place}: {words}{'  '.join(values)}  over {metrics['samples']:,.0f} images"
        probed: list[str] = []
        for name, how in _PROBES.items():
            if f"{prefix}{name}" in metrics:
                probed.append(f"{how} acc1 {metrics[f'{prefix}{name}']:.2f} %")
        if probed:
            yield f"features before the last layer: {words}{'  '.join(probed)}"


def _write_confusion(file: str, confusion: Mapping[str, Any]) -> None:
    """Write a row for each class, a column for each that its images were taken for; of the averaged weights, if any."""
    names = confusion["classes"]
    rows = [[0] * len(names) for _ in names]
    for label, told, count in confusion.get("ema") or confusion.get("raw") or ():
        rows[label][told] = count
    if not any(map(any, rows)):
        from trainkit.inference.evaluate import no_confusion

        raise no_confusion()
    with cli.opened_table(file, "--confusion") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(["class", *map(cell, names)])
        for name, row in zip(names, rows, strict=True):
            table.writerow([cell(name), *row])


def _record(run: RunDir, of: dict[str, Any], done: "Evaluation") -> None:
    record = {"time": round(time.time(), 3), **of, "step": done.step, **done.found.metrics}
    try:
        append_jsonl(run.evaluations, record)
    except (OSError, UserError) as error:  # another user's run, or an archive: the result is still printed
        why = getattr(error, "what", getattr(error, "strerror", ""))
        print(long_line(f"Could not be recorded in {run.evaluations}: {why}"), file=sys.stderr)


def _worst_classes(pairs: Mapping[tuple[int, int], int], names: Sequence[str], whose: str) -> list[str]:
    """Table of the classes with the lowest accuracy, worst first, and what they were most often taken for."""
    told: dict[int, Counter[int]] = defaultdict(Counter)
    for (label, other), count in sorted(pairs.items()):
        told[label][other] = count
    rows: list[tuple[float, int, str]] = []
    for label, others in told.items():
        total = others.total()
        right = others.pop(label, 0)
        if others:
            ((other, count),) = others.most_common(1)
            words = f"{one_line(names[label])}, taken for {one_line(names[other])} {count:,} times"
            line = f"{100 * right / total:6.2f} %  {right:>6,} of {total:<6,}  {words}"
            rows.append((right / total, label, line))
    lines = [line for _, _, line in sorted(rows)[:_SHOWN]]
    return [f"worst classes{whose}:", *lines] if lines else []


if __name__ == "__main__":
    cli.run(main)
