"""``python -m jobs.evaluate RUN``: metrics of a checkpoint on the test split."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit import plugins
from trainkit.config.loading import load
from trainkit.records.jsonl import append, plain
from trainkit.records.ownership import require_own_code
from trainkit.records.rundir import find_run


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, evaluate, print."""
    parser = cli.Parser("evaluate", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run folder or its name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example data.root=/elsewhere")
    parser.add_argument(
        "--checkpoint", default="best", metavar="best|latest|STEP", help="which weights (default: best)"
    )
    parser.add_argument(
        "--split", default="test", choices=("train", "val", "test"), help="on which data (default: test)"
    )
    cli.add_allow_code_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_intermixed_args(argv)
    run_dir = find_run(args.run, env)
    loaded = load(str(run_dir.config), args.overrides)
    require_own_code(run_dir.path, loaded, allow_code=args.allow_code)
    plugins.search_first(run_dir.code)  # the model as it was when it was trained, from any folder
    from trainkit.experiment import evaluate_checkpoint

    result = evaluate_checkpoint(loaded.config, run_dir, args.checkpoint, args.split)
    if args.split == "test":  # for the log book, which shows the newest
        try:
            append(run_dir.metrics, {"time": round(time.time(), 3), "split": args.split, **result})
        except OSError as error:  # somebody else's run, or an archive: the result is what was asked for
            print(f"Not recorded in {run_dir.metrics}: {error.strerror}.", file=sys.stderr)
    if args.json:
        print(json.dumps(plain({"run": str(run_dir.path), "split": args.split, **result}), allow_nan=False))
    else:
        print(
            f"{args.split} of step {result['step']:.0f} ({args.checkpoint}): acc1 {result['acc1']:.2f} %  "
            f"acc5 {result['acc5']:.2f} %  loss {result['loss']:.4f}  over {result['samples']:,.0f} images"
        )
    return 0


if __name__ == "__main__":
    cli.run(main)
