"""``python -m jobs.prepare DATASET``: download, verify, unpack a data set into the layout that training reads.

A second call says that it is there. On a machine without internet it says which files to bring.
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
    add("options", nargs="*", metavar="data.KEY=VALUE", help="which one, of a data set that stands for many")
    add("--root", metavar="FOLDER", default="data", help="folder of the data sets (default: data)")
    archives = "archives fetched before; also looked for in --root"
    add("--archive", metavar="FILE", nargs="+", action="extend", default=[], help=archives)
    pack = "also pack all images into one file that is mapped into memory, their shorter side SIDE pixels (256 for "
    pack += "training at 224); several times faster to read. A call that was killed goes on where it was"
    add("--pack", type=_side, metavar="SIDE", help=pack)
    formats = "raw: pixels, some 360 GB for ImageNet; jpeg: quality 90, some 33 GB, half as fast (default: raw)"
    add("--pack-format", choices=("jpeg", "raw"), default="raw", help=formats)
    add("--exif", action="store_true", help="with --pack: turn photos upright, as their EXIF data says")
    add("--workers", type=int, metavar="N", default=os.cpu_count() or 1, help="processes that pack (default: CPUs)")
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
            raise UserError(f"{key} is not for preparing.", why="Only data.* is.", fix="Give it when you train.")
        options[key.removeprefix("data.")] = value
    prepared = prepare_data(args.dataset, root, archives, terminal.warn, options)
    if args.pack is not None:
        how = {"workers": args.workers, "exif": args.exif}
        folder = pack_data(args.dataset, root, args.pack, args.pack_format, say=terminal.warn, **how)
        print(f"{folder} is complete and verified.")
    elif not prepared:
        print(f"{args.dataset} has nothing to prepare.")
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
