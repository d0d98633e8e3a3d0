"""Classes of images that nobody has labelled, as a table."""

import csv
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.data.samples import write_digits
from tests.rank_functions import run_command, run_ranks, train_run
from tests.training.parts import Linear, parts_of
from trainkit.common.terminal import name_of
from trainkit.data.datasets.digits import build
from trainkit.training.saved_model import SavedModel


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict") / "run"
    run_ranks(1, train_run, folder, "single", ("train.max_steps=40", "train.ema_decay=0.9"))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test split as files, in folders named after their classes, one of them with a blank; and a broken one."""
    folder = tmp_path_factory.mktemp("images")
    write_digits(folder, "class {}")
    (folder / "broken.jpg").write_bytes(b"nothing of the kind")
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("weights", ["raw", "ema"])
def test_as_many_are_right_as_evaluate_says_of_the_same_images(
    run: Path, images: Path, weights: str, tmp_path: Path
) -> None:
    out = tmp_path / "told.csv"
    flags = ("--out", str(out), "--weights", weights, "--batch-size", "50")
    done = run_command("predict", str(run), str(images), *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    with out.open(newline="") as file:
        (broken, *rows) = list(csv.DictReader(file))
    assert broken == {"image": "broken.jpg", "class": "", "probability": ""}
    right = sum(row["image"].startswith(f"class {row['class']}/") for row in rows)
    found = json.loads(run_command("evaluate", str(run), "--json", cwd=tmp_path).stdout)
    assert len(rows) == found["samples"]
    assert 100 * right / len(rows) == pytest.approx(found[{"raw": "acc1", "ema": "ema_acc1"}[weights]])
    assert "broken.jpg: It is not an image in a known format." in done.stderr


@pytest.mark.nightly
def test_the_most_probable_classes_come_first_for_any_batch_and_image(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    pixels, label = build(tmp_path).test[0]
    digit = Image.fromarray(pixels[0].numpy())
    wide = Image.new("L", (320, 80))  # the digit is in the square in its middle
    wide.paste(digit.resize((80, 80), Image.Resampling.NEAREST), (120, 0))
    wide.save(folder / "wide.png")
    digit.save(folder / "small.png")
    predict = ("predict", str(run), str(folder), "--top", "10", "--speed", "1,2")
    told = [run_command(*predict, "--batch-size", size, cwd=tmp_path) for size in ("1", "2")]
    tables = [list(csv.reader(done.stdout.splitlines())) for done in told]
    assert tables[0][0][:5] == ["image", "class", "probability", "class_2", "probability_2"]
    for _, *cells in tables[0][1:]:
        chances = [float(cell) for cell in cells[1::2]]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(1.0, abs=1e-5)
        assert sorted(cells[::2]) == [str(digit) for digit in range(10)]
    for one, other in zip(tables[0][1:], tables[1][1:], strict=True):
        assert one[:2] == other[:2]
        assert float(one[2]) == pytest.approx(float(other[2]), abs=1e-4)
    small, large = (next(row for row in tables[0] if row[0] == name) for name in ("small.png", "wide.png"))
    assert small[1] == large[1] == str(label)
    assert re.search(r"batch size +1: [\d,]+ images/s\nbatch size +2: [\d,]+ images/s", told[0].stderr)


def test_names_that_a_spreadsheet_or_terminal_obeys_are_told_harmlessly(run: Path, tmp_path: Path) -> None:
    names = [b"=cmd|x.png", b"-1.png", b"caf\xe9.png", b"a\x1b]0;b\x07.png", b"a\tb.png", "\u202egpj.png".encode()]
    (tmp_path / "images").mkdir()
    for name in names:
        Image.new("L", (8, 8)).save(os.path.join(os.fsencode(tmp_path / "images"), name), "PNG")
    (tmp_path / "images" / os.fsdecode(b"broken\xe9\x1b[2J.png")).write_bytes(b"")
    out = tmp_path / "told.csv"
    for where in (["--out", str(out)], []):
        done = run_command("predict", str(run), str(tmp_path / "images"), *where, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        text = done.stdout if not where else out.read_text("utf-8")
        cells = [row["image"] for row in csv.DictReader(io.StringIO(text))]
        assert {os.fsencode(name_of(cell)) for cell in cells} == {*names, b"broken\xe9\x1b[2J.png"}
        assert all(cell.isprintable() and cell[0] not in "=+-@" for cell in cells)
        assert "\x1b" not in done.stderr


def test_an_image_whose_scores_are_not_finite_has_no_class(tmp_path: Path) -> None:
    class Fragile(Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images).where(images.mean(dim=(1, 2, 3)).gt(0)[:, None], float("nan"))

    parts = parts_of(model=Fragile())
    predictor = SavedModel(parts.model.eval(), parts.splits, parts.config, 0, "raw")
    for name, shade in (("dark.png", 0), ("light.png", 255)):
        Image.new("RGB", (4, 4), (shade,) * 3).save(tmp_path / name)
    dark, light = predictor.predict([tmp_path / "dark.png", tmp_path / "light.png"], 2)
    assert (dark.values, dark.why) == (None, "The model's scores for it are not finite (NaN).")
    assert light.values is not None


def test_an_unwritable_table_and_a_step_that_is_not_there_are_refused(run: Path, images: Path, tmp_path: Path) -> None:
    for words, says in ((("--out", "absent/x.csv"), "absent/x.csv cannot be written"), (("--checkpoint", "7"), "40")):
        done = run_command("predict", str(run), str(images), *words, cwd=tmp_path)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
