"""``python -m jobs.evaluate RUN``: metrics of a checkpoint on the test split."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit import plugins, terminal
from trainkit.config.loading import load
from trainkit.config.task import metrics_of
from trainkit.errors import UserError
from trainkit.fileio import append_jsonl, finite
from trainkit.run.folder import RunDir, is_url
from trainkit.run.ownership import require_own_code

_SHOWN = 5


def parser() -> cli.Parser:
    parser = cli.Parser("evaluate", __doc__)
    cli.add_run_to_read(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example data.root=/elsewhere")
    parser.add_argument(
        "--split", default="test", choices=("train", "val", "test"), help="on which data (default: test)"
    )
    parser.add_argument(
        "--weights",
        choices=("raw", "ema", "both"),
        help="the model's own, the averaged ones (train.ema_decay) or both (default: all that there are)",
    )
    cli.add_allow_code_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, evaluate, print."""
    args = parser().parse_intermixed_args(argv)
    with cli.run_to_read(args.run, env) as run_dir:
        return _evaluate(args, run_dir)


def _evaluate(args: argparse.Namespace, run_dir: RunDir) -> int:
    loaded = load(str(run_dir.config), args.overrides)
    found = require_own_code(run_dir.path, loaded, allow_code=args.allow_code, only_loads=True)
    plugins.search_snapshot(found.code, own=found.own)  # as it was when it was trained, from any folder
    from trainkit.inference import evaluate_checkpoint
    from trainkit.tasks.meter import names_of

    done = evaluate_checkpoint(loaded.config, run_dir, args.checkpoint, args.split, args.weights)
    metrics, counts = done.found.metrics, done.found.counts
    names = names_of(done.info, counts)
    result = {"step": done.step, **metrics}
    if not is_url(args.run):
        of = {"split": args.split, "checkpoint": done.which, "settings": args.overrides}
        try:
            append_jsonl(run_dir.evaluations, {"time": round(time.time(), 3), **of, **result})
        except (OSError, UserError) as error:  # a stranger's run, or an archive: the result is what was asked for
            why = error.what if isinstance(error, UserError) else f"{error.strerror}."
            print(terminal.one_line(f"Not recorded in {run_dir.evaluations}: {why}", 5000), file=sys.stderr)
    if args.json:
        confusion = {kind: each.to_json() for kind, each in counts.items()}
        classes = {"classes": names, "confusion": confusion}
        print(json.dumps(finite({"run": str(run_dir.path), "split": args.split, **result, **classes}), allow_nan=False))
        return 0
    known = metrics_of(loaded.config.task.name)
    for prefix, words in (("", ""), ("ema_", "averaged weights: ")):
        measured = [name for name in (*list(known.metrics)[1:], "loss") if f"{prefix}{name}" in metrics]
        if measured:
            values = "  ".join(known.words(name, metrics[f"{prefix}{name}"]) for name in measured)
            place = f"{args.split} of step {done.step} ({done.which})"
            print(f"{place}: {words}{values}  over {metrics['samples']:,.0f} images")
    for kind, each in counts.items():
        print(*worst_classes(each.pairs, names, "averaged weights" if kind == "ema" else ""), sep="\n")
    return 0


def worst_classes(pairs: Mapping[tuple[int, int], int], names: Sequence[str], whose: str) -> list[str]:
    """A table of the classes that were told right least often, the worst first, and what they were taken for."""
    told: dict[int, dict[int, int]] = {}
    for (label, other), count in pairs.items():
        told.setdefault(label, {})[other] = count
    rows: list[tuple[float, str]] = []
    for label, others in told.items():
        right = others.pop(label, 0)
        if others:
            other, count = max(others.items(), key=lambda item: (item[1], -item[0]))
            share = right / (total := right + sum(others.values()))
            words = f"{100 * share:6.2f} %  {right:>6,} of {total:<6,}  {terminal.one_line(names[label])}"
            rows.append((share, f"{words}, taken for {terminal.one_line(names[other])} {count:,} times"))
    if not rows:
        return []
    head = "worst classes" + (f" ({whose})" if whose else "")
    return [f"{head}:", *(line for _, line in sorted(rows, key=lambda row: row[0])[:_SHOWN])]


if __name__ == "__main__":
    cli.run(main)
