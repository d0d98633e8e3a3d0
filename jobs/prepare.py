"""`python -m jobs.prepare DATASET`: download, verify, unpack a data set into the layout that training reads."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit import plugins
from trainkit.errors import UserError, did_you_mean


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Returns the exit code: 0 when the data is there, whether it was before or is now."""
    parser = cli.Parser(
        "prepare",
        "Download (cifar10, fashion_mnist) or unpack (cinic10, imagenet) a data set, and verify it.\n"
        "A second call says that it is there. On a machine without internet it says which files to bring.",
    )
    parser.add_argument("dataset", metavar="DATASET", help=", ".join(plugins.available("trainkit.data")))
    parser.add_argument("--root", metavar="FOLDER", default="data", help="folder of the data sets (default: data)")
    parser.add_argument(
        "--archive", metavar="FILE", nargs="+", default=[], help="archives fetched before; also looked for in --root"
    )
    args = parser.parse_args(argv)
    names = plugins.available("trainkit.data")
    if args.dataset not in names:
        raise UserError(
            f"Unknown data set '{args.dataset}'.",
            why=f"There are: {', '.join(names)}.",
            fix=did_you_mean(args.dataset, names, otherwise="Use one of them."),
        )
    archives = [Path(archive) for archive in args.archive]
    for archive in archives:
        if not archive.is_file():
            raise UserError(f"There is no file {archive}.", why="It was given to --archive.", fix="Correct its path.")
    module = importlib.import_module(f"trainkit.data.{args.dataset}")
    if not hasattr(module, "prepare"):  # a data set that somebody added, and brings by other means
        print(f"{args.dataset} has nothing to prepare.")
        return 0
    try:
        module.prepare(Path(args.root), archives, _say)
    except OSError as error:
        raise UserError(
            f"The data set '{args.dataset}' could not be written to {args.root}.",
            why=f"{error}.",
            fix="Check its permissions, the disk's free space and your quota, or give another --root.",
        ) from None
    print(f"Train on it: data.name={args.dataset}" + (f" data.root={args.root}" if args.root != "data" else ""))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
