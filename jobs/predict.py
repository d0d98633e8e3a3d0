"""``python -m jobs.predict RUN FOLDER``: classes and probabilities of images, as CSV; images/s by batch size."""

import argparse
import csv
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jobs import cli
from trainkit.run.folder import RunDir
from trainkit.terminal import cell, one_line

if TYPE_CHECKING:
    from trainkit.saved_model import SavedModel

_SHOWN = 5


def parser() -> cli.Parser:
    parser = cli.Parser("predict", __doc__)
    add = parser.add_argument
    parser.taking("run")
    add("folder", metavar="FOLDER", help="images at any depth of it; or one image")
    parser.taking("overrides", "--checkpoint")
    add("--out", metavar="FILE.csv", help="default: standard output")
    add("--top", metavar="K", type=_count, default=1, help="the K most probable classes (default: 1)")
    add("--batch-size", metavar="N", type=_count, default=64, help="images at a time (default: 64)")
    speed = "also say how many images/s the model takes by batch size"
    add("--speed", metavar="N,N,...", type=_counts, default=(), help=speed)
    return parser.taking("--weights", "--allow-code")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, predict, write."""
    args = parser().parse_intermixed_args(argv)
    with cli.run_to_read(args.run, env) as run:
        return _predict(args, run)


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not (count := int(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is not 1 or more")
    return count


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _predict(args: argparse.Namespace, run: RunDir) -> int:
    config = cli.settings_to_read(run, args)
    from trainkit.inference import predicting
    from trainkit.saved_model import images_in

    folder = Path(args.folder).expanduser()
    images = images_in(folder)
    by_data = any(word.startswith("data.") for word in args.overrides)  # or they would be passed over in silence
    asked = predicting(config, run, args.checkpoint, args.weights, by_data=by_data)
    with asked as predictor, cli.opened_table(args.out, "--out") as out:
        began = time.perf_counter()
        broken = _write(out, predictor, images, folder, args)
        seconds = time.perf_counter() - began
        by = f"{'averaged ' * (predictor.kind == 'ema')}weights of step {predictor.step} ({args.checkpoint})"
        speed = f"{len(images) / seconds:,.0f} images/s, reading included"
        told = [f"{len(images):,} images by the {by}: {speed}"]
        if config.data.fake:
            told.append("It was trained on made-up images: its classes mean nothing.")
        if predictor.renamed:
            told.append(f"Classes are called as in training; {one_line(predictor.renamed)}.")
        if broken:
            more = f", and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
            why = "; ".join(f"{one_line(str(file))}: {one_line(why)}" for file, why in list(broken.items())[:_SHOWN])
            told.append(f"{len(broken):,} without a class: {why}{more}")
        print("\n".join(told), file=sys.stderr)
        if (whole := next((image for image in images if image not in broken), None)) is None:
            return 1
        for size in args.speed:
            print(f"batch size {size:>5}: {_speed(predictor, whole, size)}", file=sys.stderr)
    return 0


def _write(
    out: TextIO, predictor: "SavedModel", images: Sequence[Path], folder: Path, args: argparse.Namespace
) -> dict[Path, str]:
    """Write a row for each image: its most probable classes, or the raw outputs of a model without classes.

    Returns the images without a prediction, with the reason.
    """
    names, broken = [cell(name) for name in predictor.info.class_names], {}
    top = min(args.top, len(names))
    columns = names
    if predictor.tells_classes:
        further = [f"{word}_{place}" for place in range(2, top + 1) for word in ("class", "probability")]
        columns = ["class", "probability", *further]
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["image", *columns])
    for told in predictor.predict(images, args.batch_size):
        if told.values is None:
            broken[told.image] = told.why
            cells = [""] * len(columns)
        elif predictor.tells_classes:
            best = zip(*(part.tolist() for part in told.values.topk(top)), strict=True)
            cells = [text for value, label in best for text in (names[label], f"{value:.6f}")]
        else:
            cells = [f"{value:.6g}" for value in told.values.tolist()]
        name = told.image.relative_to(folder) if told.image != folder else folder.name
        table.writerow([cell(str(name)), *cells])
    return broken


def _speed(predictor: "SavedModel", image: Path, batch_size: int) -> str:
    from torch import OutOfMemoryError

    from trainkit.inference import images_per_sec

    try:
        return f"{images_per_sec(predictor, image, batch_size):,.0f} images/s"
    except OutOfMemoryError:
        return "does not fit into memory"


if __name__ == "__main__":
    cli.run(main)
