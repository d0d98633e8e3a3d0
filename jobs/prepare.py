"""``python -m jobs.prepare DATASET``: download, verify and unpack a data set for training.

If the data is already there, it says so. On a machine without internet it says which files to bring.
"""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.config import plugins

_SETTING = re.compile(r"data\.\w+=")


def parser() -> cli.Parser:
    parser = cli.Parser("prepare", __doc__)
    add = parser.add_argument
    add("dataset", metavar="DATASET", help=", ".join(plugins.available("trainkit.data.datasets")))
    add("options", nargs="*", metavar="data.KEY=VALUE", help="one of several data sets: data.dataset=CIFAR100")
    add("--root", metavar="FOLDER", default="data", help="folder of the data sets (default: data)")
    archives = "archives that you downloaded; --root is searched too"
    add("--archive", metavar="FILE", nargs="+", action="extend", default=[], help=archives)
    pack = "also pack all images into one file that is mapped into memory, with a shorter side of SIDE pixels (256 for "
    pack += "training at 224); several times faster to read. If it was killed, calling it again continues"
    add("--pack", type=_side, metavar="SIDE", help=pack)
    formats = "raw: pixels, about 360 GB for ImageNet; jpeg: quality 90, about 33 GB, half as fast (default: raw)"
    add("--pack-format", choices=("jpeg", "raw"), default="raw", help=formats)
    add("--exif", action="store_true", help="with --pack: turn photos upright, as their EXIF data says")
    add("--workers", type=int, metavar="N", default=os.cpu_count() or 1, help="packing processes (default: CPUs)")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Returns the exit code: 0 when the data is there, whether it was before or is now."""
    args = parser().parse_intermixed_args(argv)
    from trainkit.config.layers import override_layer
    from trainkit.config.schema import DataConfig
    from trainkit.data import losses
    from trainkit.data.registry import counts_of, pack_data, prepare_data

    root = Path(args.root)
    # --archive takes all words up to the next flag, also settings.
    archives = []
    for word in args.archive:
        if _SETTING.match(word):
            args.options.append(word)
        else:
            archives.append(Path(word))
    options = {}
    for key, (value, _) in override_layer(args.options).items():
        if not key.startswith("data."):
            raise UserError(f"{key} has no effect on prepare.", why="Only data.* has.", fix="Give it when you train.")
        options[key.removeprefix("data.")] = value
    prepared = prepare_data(args.dataset, root, archives, terminal.warn, options)
    if args.pack is not None:
        how = {"workers": args.workers, "exif": args.exif}
        folder = pack_data(args.dataset, root, args.pack, args.pack_format, say=terminal.warn, **how)
        print(f"{folder} is complete and verified.")
    elif not prepared:
        print(f"{args.dataset} needs no preparation.")
        return 0
    given = {"name": args.dataset, "root": args.root, "pack": args.pack, **options}
    for line in losses.in_lines(counts_of(DataConfig.model_validate(given))):
        print(line)
    settings = [f"data.name={args.dataset}", *args.options]
    if args.root != "data":
        settings.append(f"data.root={args.root}")
    if args.pack is not None:
        settings.append(f"data.pack={args.pack}")
        if args.exif:
            settings.append("data.exif=true")
    print(f"Train on it: {' '.join(settings)}")
    return 0


def _side(text: str) -> int:
    if not text.isdecimal() or not 8 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError("a number of pixels from 8 to 4096")
    return int(text)


if __name__ == "__main__":
    cli.run(main)
