"""``python -m jobs.prepare DATASET``: download, verify, unpack a data set into the layout that training reads."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit import plugins
from trainkit.data import prepare_data


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Returns the exit code: 0 when the data is there, whether it was before or is now."""
    parser = cli.Parser(
        "prepare",
        "Download or unpack a data set, and verify it.\n"
        "A second call says that it is there. On a machine without internet it says which files to bring.",
    )
    parser.add_argument("dataset", metavar="DATASET", help=", ".join(plugins.available("trainkit.data")))
    parser.add_argument("--root", metavar="FOLDER", default="data", help="folder of the data sets (default: data)")
    parser.add_argument(
        "--archive", metavar="FILE", nargs="+", default=[], help="archives fetched before; also looked for in --root"
    )
    args = parser.parse_args(argv)
    if not prepare_data(args.dataset, Path(args.root), [Path(archive) for archive in args.archive], _say):
        print(f"{args.dataset} has nothing to prepare.")
        return 0
    print(f"Train on it: data.name={args.dataset}" + (f" data.root={args.root}" if args.root != "data" else ""))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
