"""What a new run finds in its data: it says so, and keeps it."""

import csv
import json
from pathlib import Path

import pytest
from PIL import ExifTags, Image

from tests.data.samples import write_images
from tests.jobs.conftest import Command
from tests.rank_functions import run_command
from trainkit.common import fileio
from trainkit.config.loading import load
from trainkit.data.registry import build_data
from trainkit.inference.evaluate import _labelled
from trainkit.run.folder import RunDir
from trainkit.training.saved_model import open_saved

pytestmark = pytest.mark.usefixtures("no_slurm")
QUICK = ("train.max_steps=1", "train.global_batch_size=4", "model.name=fashion_cnn", "data.workers=0",
         "monitor.loggers=[jsonl]", "launch.gpus_per_node=0")  # fmt: skip
SAID = "Guessed: data.image_size=16; the shorter sides of 18 images are 16 pixels."


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", {"cat": 9, "dog": 9})
    return tmp_path / "photos"


def size_of(run: Path) -> object:
    return load(str(run)).config.data.options.get("image_size")


def grow(photos: Path) -> None:
    write_images(photos, {"cat": 9, "dog": 9}, size=(100, 80))


def test_a_size_that_is_guessed_is_said_and_part_of_the_run(command: Command, photos: Path, tmp_path: Path) -> None:
    asked = ("single", *QUICK, "data.name=image_folder", f"data.root={photos}")
    dry = command("submit", *asked, "--dry-run").ok()
    assert SAID in dry.err
    (row,) = (line.split() for line in dry.err.splitlines() if line.startswith("data.image_size"))
    assert row[1:3] == ["16", "guessed"]
    assert SAID in command("submit", *asked, "--run-dir", "here", "--executor", "debug").ok().err
    assert size_of(tmp_path / "here") == 16
    assert "Guessed" not in command("submit", *asked, "data.image_size=32", "--dry-run").ok().err
    sweep = command("submit", *asked, "--sweep", "seed=0..3", "--dry-run").ok().err
    assert sweep.count("Guessed") == 1


def test_a_run_that_goes_on_or_is_repeated_guesses_nothing(command: Command, photos: Path, tmp_path: Path) -> None:
    asked = ("single", *QUICK, "data.name=image_folder", f"data.root={photos}")
    command("train", *asked, "--run-dir", "here").ok()
    assert size_of(tmp_path / "here") == 16
    grow(photos)
    for words in (("train", *asked, "--run-dir", "here"), ("train", "here"), ("submit", "here", "--dry-run"),
                  ("evaluate", "here")):  # fmt: skip
        assert "Guessed" not in command(*words).ok().err
    assert size_of(tmp_path / "here") == 16
    assert "data.image_size=80" in command("submit", *asked, "--dry-run").ok().err, "a new run does"


@pytest.mark.nightly
def test_a_run_from_before_keeps_the_size_it_was_trained_at(command: Command, photos: Path, tmp_path: Path) -> None:
    asked = ("single", *QUICK, "data.name=image_folder", f"data.root={photos}")
    command("train", *asked, "data.image_size=224", "--run-dir", "here").ok()
    written = (tmp_path / "here" / "config.yaml").read_text()
    fileio.write(tmp_path / "here" / "config.yaml", written.replace(", image_size: 224", ""))
    assert size_of(tmp_path / "here") is None
    for words in (("train", "here"), ("submit", "here", "--dry-run"), ("evaluate", "here")):
        assert "Guessed" not in command(*words).ok().err
    assert size_of(tmp_path / "here") is None


def test_a_new_run_takes_every_kind_and_an_older_one_its_files(command: Command, photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "000.jpg").rename(photos / "cat" / "000.jfif")
    (photos / "cat" / "notes.txt").touch()
    (photos / "dog" / "heads").write_bytes(b"of dogs")
    asked = ("single", *QUICK, "data.name=image_folder", f"data.root={photos}", "data.image_size=16")
    dry = command("submit", *asked, "--dry-run").ok().err
    assert "left out: 1 no image (cat/notes.txt), 1 not an image by the first bytes (dog/heads)." in dry
    command("train", *asked, "--run-dir", "here").ok()
    config = tmp_path / "here" / "config.yaml"
    assert load(str(config.parent)).config.data.all_kinds
    fileio.write(config, config.read_text().replace(", all_kinds: true", ""))  # as it was before
    for words in (("submit", "here", "--dry-run"), ("train", "here"), ("train", *asked, "--run-dir", "here")):
        command(*words).ok()
        assert not load(str(config.parent)).config.data.all_kinds
    before = len(build_data(load(str(config.parent)).config.data).train)
    assert before == len(build_data(load(str(config.parent), ["data.all_kinds=true"]).config.data).train) - 1
    told = command("predict", "here", str(photos)).ok()
    rows = {row["image"]: row["class"] for row in csv.DictReader(told.out.splitlines())}
    assert len(rows) == 19, "each file that may be an image has a row"
    assert rows["cat/000.jfif"]
    assert rows["dog/heads"] == ""
    assert "dog/heads: It is not an image in a known format." in told.err
    assert "Left out: 1 no image (cat/notes.txt)" in told.err


@pytest.mark.nightly
def test_what_is_read_of_each_split_is_said_and_kept(command: Command, photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "notes.txt").touch()
    asked = ("single", *QUICK, "data.name=image_folder", f"data.root={photos}", "data.image_size=16")
    lines = [
        "Data: train: 14 images of 2 classes; left out: 1 no image (cat/notes.txt).",
        "Data: val: 2 images of 2 classes; split off train.",
        "Data: test: 2 images of 2 classes; split off train.",
    ]
    dry = command("submit", *asked, "--sweep", "seed=0..1", "--dry-run").ok().err.splitlines()
    assert [line for line in dry if line.startswith("Data: ")] == lines
    left_out = {"no image": {"count": 1, "example": "cat/notes.txt"}}
    part = {"images": 2, "classes": 2, "left_out": {}, "note": "split off train"}
    facts = {"train": {"images": 14, "classes": 2, "left_out": left_out, "note": ""}, "val": part, "test": part}
    for verb in ("train", "launch", "submit"):  # submit makes this process a rank
        more = ("--executor", "debug") if verb == "submit" else ()
        said = command(verb, *asked, "--run-dir", verb, *more).ok().err.splitlines()
        assert [line for line in said if line.startswith("Data: ")] == lines
        assert json.loads((tmp_path / verb / "manifest.json").read_text())["data"] == facts


@pytest.mark.nightly
def test_photos_to_predict_are_turned_as_those_of_the_training(photos: Path, tmp_path: Path) -> None:
    """A photo and the same one lying on its side are told alike; without data.exif they are not."""
    picture = Image.linear_gradient("L").resize((20, 16)).convert("RGB")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned a quarter to the right
    (tmp_path / "new").mkdir()
    picture.save(tmp_path / "new" / "upright.jpg", quality=100)
    lying = picture.transpose(Image.Transpose.ROTATE_90)
    lying.save(tmp_path / "new" / "lying.jpg", quality=100, exif=exif)
    told = {}
    for turned in ("true", "false"):
        words = (*QUICK, "data.name=image_folder", f"data.root={photos}", f"data.exif={turned}", "--run-dir", turned)
        assert run_command("train", "single", *words, cwd=tmp_path).returncode == 0
        done = run_command("predict", str(RunDir(tmp_path / turned).path), "new", cwd=tmp_path)
        told[turned] = [float(row["probability"]) for row in csv.DictReader(done.stdout.splitlines())]
        with Image.open(tmp_path / "new" / "lying.jpg") as given:  # as a notebook gives it
            saved = open_saved(load(str(tmp_path / turned)).config, RunDir(tmp_path / turned))
            (one,) = saved.predict([given])
            assert one.probability == pytest.approx(told[turned][0], abs=1e-3)
        (tmp_path / turned / "labelled" / "cat").mkdir(parents=True)
        lying.save(tmp_path / turned / "labelled" / "cat" / "lying.jpg", exif=exif)
        image, _ = _labelled(saved, tmp_path / turned / "labelled").test[0]
        assert tuple(image.shape) == ((3, 16, 20) if turned == "true" else (3, 20, 16)), "for evaluate --data"
    assert told["true"][0] == pytest.approx(told["true"][1], abs=1e-3)
    assert told["false"][0] != pytest.approx(told["false"][1], abs=1e-3)
