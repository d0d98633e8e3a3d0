"""``python -m jobs.evaluate RUN``: metrics of a checkpoint on the test split."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jobs import cli
from trainkit import terminal
from trainkit.errors import UserError
from trainkit.fileio import append_jsonl, finite
from trainkit.run.folder import RunDir, is_url

if TYPE_CHECKING:
    from trainkit.inference import Evaluation

_SHOWN = 5


def parser() -> cli.Parser:
    parser = cli.Parser("evaluate", __doc__).taking("run", "overrides", "--checkpoint", "--allow-code")
    add = parser.add_argument
    add("--split", default="test", choices=("train", "val", "test"), help="on which data (default: test)")
    weights = "the model's own, the averaged ones (train.ema_decay) or both (default: all that there are)"
    add("--weights", choices=("raw", "ema", "both"), help=weights)
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, evaluate, print."""
    args = parser().parse_intermixed_args(argv)
    from trainkit.config.components import metrics_of

    with cli.run_to_read(args.run, env) as run:
        config = cli.settings_to_read(run, args)
        from trainkit.inference import evaluate_checkpoint

        done = evaluate_checkpoint(config, run, args.checkpoint, args.split, args.weights)
        if not is_url(args.run):
            _record(run, {"split": args.split, "checkpoint": done.which, "settings": args.overrides}, done)
    from trainkit.tasks.meter import confusion_json

    metrics, counts = done.found.metrics, done.found.counts
    confusion = confusion_json(done.info, counts)
    names = confusion["classes"]
    if args.json:
        told = {"run": str(run.path), "split": args.split, "step": done.step, **metrics, "classes": names}
        told["confusion"] = {kind: confusion[kind] for kind in counts}
        print(json.dumps(finite(told), allow_nan=False))
        return 0
    known = metrics_of(config.task.name)
    for prefix, words in (("", ""), ("ema_", "averaged weights: ")):
        measured = [name for name in (*list(known.metrics)[1:], "loss") if f"{prefix}{name}" in metrics]
        if measured:
            values = "  ".join(known.words(name, metrics[f"{prefix}{name}"]) for name in measured)
            place = f"{args.split} of step {done.step} ({done.which})"
            print(f"{place}: {words}{values}  over {metrics['samples']:,.0f} images")
    for kind, each in counts.items():
        print(*_worst_classes(each, names, " (averaged weights)" if kind == "ema" else ""), sep="\n")
    return 0


def _record(run: RunDir, of: dict[str, Any], done: Evaluation) -> None:
    record = {"time": round(time.time(), 3), **of, "step": done.step, **done.found.metrics}
    try:
        append_jsonl(run.evaluations, record)
    except (OSError, UserError) as error:  # another user's run, or an archive: the result is still printed
        why = error.what if isinstance(error, UserError) else f"{error.strerror}."
        print(terminal.long_line(f"Not recorded in {run.evaluations}: {why}"), file=sys.stderr)


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
            share, name, taken = right / total, terminal.one_line(names[label]), terminal.one_line(names[other])
            words = f"{100 * share:6.2f} %  {right:>6,} of {total:<6,}  {name}, taken for {taken} {count:,} times"
            rows.append((share, words))
    rows.sort(key=lambda row: row[0])
    return [f"worst classes{whose}:", *(line for _, line in rows[:_SHOWN])] if rows else []


if __name__ == "__main__":
    cli.run(main)
