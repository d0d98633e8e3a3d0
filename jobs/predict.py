"""``python -m jobs.predict RUN FOLDER``: classes and probabilities of images, as CSV; images/s by batch size."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jobs import cli
from trainkit import plugins
from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.fileio import replacing
from trainkit.run.folder import RunDir
from trainkit.run.ownership import require_own_code
from trainkit.terminal import cell, one_line

if TYPE_CHECKING:
    from trainkit.inference import Prediction, Predictor

_SHOWN = 5


def parser() -> cli.Parser:
    parser = cli.Parser("predict", __doc__)
    cli.add_run_to_read(parser)
    parser.add_argument("folder", metavar="FOLDER", help="images at any depth of it; or one image")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example data.root=/elsewhere")
    parser.add_argument("--out", metavar="FILE.csv", help="default: standard output")
    parser.add_argument("--top", metavar="K", type=int, default=1, help="the K most probable classes (default: 1)")
    parser.add_argument("--batch-size", metavar="N", type=int, default=64, help="images at a time (default: 64)")
    parser.add_argument("--speed", metavar="N,N,...", help="also say how many images/s the model takes by batch size")
    cli.add_weights_flag(parser)
    cli.add_allow_code_flag(parser)
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, predict, write."""
    args = parser().parse_intermixed_args(argv)
    _require(args.top >= 1, f"--top {args.top}", "It is the number of classes that are told of each image.")
    _require(args.batch_size >= 1, f"--batch-size {args.batch_size}", "It is a number of images.")
    sizes = [_batch_size(word) for word in args.speed.split(",")] if args.speed is not None else []
    with cli.run_to_read(args.run, env) as run_dir:
        return _predict(args, run_dir, sizes)


def _require(condition: bool, what: str, why: str) -> None:
    if not condition:
        raise UserError(f"{what} is not possible.", why=why, fix="Give 1 or more.")


def _batch_size(word: str) -> int:
    _require(word.strip().isdecimal() and int(word) >= 1, f"--speed {word!r}", "It takes batch sizes: --speed 1,8,64.")
    return int(word)


def _predict(args: argparse.Namespace, run_dir: RunDir, sizes: Sequence[int]) -> int:
    loaded = load(str(run_dir.config), args.overrides)
    found = require_own_code(run_dir.path, loaded, allow_code=args.allow_code, only_loads=True)
    plugins.search_snapshot(found.code, own=found.own)  # as it was when it was trained, from any folder
    from trainkit.inference import images_in, predicting

    folder = Path(args.folder).expanduser()
    images = images_in(folder)
    with (
        predicting(loaded.config, run_dir, args.checkpoint, args.weights) as predictor,
        _written(args.out) as out,
    ):
        began = time.perf_counter()
        told = predictor.predict(images, args.batch_size)
        broken = _write(out, told, folder, args.top if predictor.tells_classes else None, predictor.class_names)
        seconds = time.perf_counter() - began
        kind = "averaged weights" if predictor.kind == "ema" else "weights"
        print(
            f"{len(images):,} images by the {kind} of step {predictor.step} ({args.checkpoint}): "
            f"{len(images) / seconds:,.0f} images/s, reading included",
            file=sys.stderr,
        )
        if predictor.renamed:
            print(f"Classes are called as in training; {one_line(predictor.renamed)}.", file=sys.stderr)
        if broken:
            more = f", and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
            named = "; ".join(f"{one_line(str(each.file))}: {one_line(each.why)}" for each in broken[:_SHOWN])
            print(f"{len(broken):,} without a class: {named}{more}", file=sys.stderr)
        without = {each.file for each in broken}
        whole = next((image for image in images if image not in without), None)
        if whole is None:
            return 1
        for size in sizes:
            _say_speed(predictor, whole, size)
    return 0


@contextmanager
def _written(file: str | None) -> Iterator[TextIO]:
    """A file that is complete or absent; None: standard output."""
    if file is None:
        yield sys.stdout
        return
    final = Path(file).expanduser()
    try:
        with replacing(final) as content, TextIOWrapper(content, encoding="utf-8", newline="") as out:
            yield out
    except OSError as error:
        raise UserError(
            f"{final} cannot be written.", why=f"{error.strerror}.", fix="Give another --out, or leave it out."
        ) from None


def _write(
    out: TextIO, told: Iterable[Prediction], folder: Path, top: int | None, class_names: Sequence[str]
) -> list[Prediction]:
    """A row for each image, with its most probable classes or, where ``top`` is None, the outputs; those without."""
    broken = []
    if top is None:
        columns = [cell(name) for name in class_names]
    else:
        top = min(top, len(class_names))
        further = [name for place in range(2, top + 1) for name in (f"class_{place}", f"probability_{place}")]
        columns = ["class", "probability", *further]
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["image", *columns])
    for each in told:
        name = each.file.relative_to(folder) if each.file != folder else folder.name
        if each.values is None:
            broken.append(each)
            table.writerow([cell(str(name)), *[""] * len(columns)])
            continue
        if top is None:
            table.writerow([cell(str(name)), *(f"{value:.6g}" for value in each.values.tolist())])
            continue
        values, labels = (part.tolist() for part in each.values.topk(top))
        cells = zip((cell(class_names[label]) for label in labels), (f"{value:.6f}" for value in values), strict=True)
        table.writerow([cell(str(name)), *(value for pair in cells for value in pair)])
    return broken


def _say_speed(predictor: Predictor, image: Path, batch_size: int) -> None:
    from torch import OutOfMemoryError

    try:
        told = f"{predictor.images_per_sec(image, batch_size):,.0f} images/s"
    except OutOfMemoryError:
        told = "does not fit into memory"
    print(f"batch size {batch_size:>5}: {told}", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
