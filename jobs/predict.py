"""``python -m jobs.predict RUN FOLDER``: write classes and probabilities of images as CSV; measure images/s."""

import argparse
import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from jobs import cli
from trainkit.common.terminal import cell, one_line, warn
from trainkit.run.folder import RunDir

if TYPE_CHECKING:
    from trainkit.training.saved_model import SavedModel

_SHOWN = 5


def parser() -> cli.Parser:
    parser = cli.Parser("predict", __doc__)
    add = parser.add_argument
    parser.taking("run")
    add("folder", metavar="FOLDER", help="folder with images, searched at any depth; or one image")
    parser.taking("overrides", "--checkpoint")
    add("--out", metavar="FILE.csv", help="default: standard output")
    add("--top", metavar="K", type=_count, default=1, help="the K most probable classes (default: 1)")
    add("--batch-size", metavar="N", type=_count, default=64, help="images at a time (default: 64)")
    speed = "also measure images/s at these batch sizes"
    add("--speed", metavar="N,N,...", type=_counts, default=(), help=speed)
    return parser.taking("--weights", "--allow-code")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, predict, write."""
    args = parser().parse_intermixed_args(argv)
    with cli.run_to_read(args.run, env) as run:
        return _predict(args, run)


def _count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not 1 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    return list(map(_count, text.split(",")))


def _predict(args: argparse.Namespace, run: RunDir) -> int:
    config = cli.settings_to_read(run, args, "predict")
    from trainkit.data import image_kinds
    from trainkit.inference.predict import predicting
    from trainkit.training.saved_model import images_in

    folder = Path(args.folder).expanduser()
    images, left_out = images_in(folder)
    by_data = any(word.startswith("data.") for word in args.overrides)  # or they would be passed over in silence
    asked = predicting(config, run, args.checkpoint, args.weights, by_data=by_data)
    with asked as predictor, cli.opened_table(args.out, "--out") as out:
        began = time.perf_counter()
        broken = _write(out, predictor, images, folder, args)
        speed = f"{len(images) / (time.perf_counter() - began):,.0f} images/s, reading included"
        averaged = "averaged " if predictor.kind == "ema" else ""
        weights = f"{averaged}weights of step {predictor.step} ({args.checkpoint})"
        warn(f"{len(images):,} images predicted with the {weights}: {speed}")
        if config.data.fake:
            warn("The model was trained on made-up images: its classes mean nothing.")
        if predictor.renamed:
            warn(f"Classes have the names of the training; {one_line(predictor.renamed)}.")
        if left_out:
            warn(f"Left out: {image_kinds.left_out_in_words(left_out, folder)}")
        if broken:
            reasons = [f"{one_line(file)}: {one_line(why)}" for file, why in broken.items()]
            if len(reasons) > _SHOWN:
                reasons[_SHOWN:] = [f"and {len(reasons) - _SHOWN} more"]
            warn(f"{len(broken):,} without a class: {'; '.join(reasons)}")
        if len(broken) == len(images):
            return 1
        whole = min(set(images).difference(broken))
        for size in args.speed:
            warn(f"batch size {size:>5}: {_speed(predictor, whole, size)}")
    return 0


def _write(
    out: TextIO, predictor: "SavedModel", images: Sequence[Path], folder: Path, args: argparse.Namespace
) -> dict[Path, str]:
    """Write a row for each image: its most probable classes, or the raw outputs of a model without classes.

    Returns the images without a prediction, with the reason.
    """
    names = list(map(cell, predictor.info.class_names))
    broken: dict[Path, str] = {}
    top = min(args.top, len(names))
    columns = names
    if predictor.tells_classes:
        columns = ["class", "probability"]
        for place in range(2, top + 1):
            columns += [f"class_{place}", f"probability_{place}"]
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["image", *columns])
    for told in predictor.predict(images, args.batch_size):
        cells: list[str] = []
        if told.values is None:
            broken[told.image] = told.why
            cells = [""] * len(columns)
        elif predictor.tells_classes:
            values, labels = told.values.topk(top)
            for value, label in zip(values.tolist(), labels.tolist(), strict=True):
                cells += [names[label], f"{value:.6f}"]
        else:
            cells = list(map("{:.6g}".format, told.values.tolist()))
        name = folder.name
        if told.image != folder:
            name = str(told.image.relative_to(folder))
        table.writerow([cell(name), *cells])
    return broken


def _speed(predictor: "SavedModel", image: Path, batch_size: int) -> str:
    from torch import OutOfMemoryError

    from trainkit.inference.predict import images_per_sec

    try:
        return f"{images_per_sec(predictor, image, batch_size):,.0f} images/s"
    except OutOfMemoryError:
        return "does not fit into memory"


if __name__ == "__main__":
    cli.run(main)
