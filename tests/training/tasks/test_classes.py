"""A checkpoint says which classes it was trained on: what is told of images stays right when the data has changed."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.rank_functions import run_command, run_ranks, train_run
from tests.training.parts import keeper_of, parts_of
from trainkit.checkpoint import format
from trainkit.common.errors import UserError
from trainkit.data.base import Splits
from trainkit.training.progress import Progress
from trainkit.training.recorder import go_on
from trainkit.training.tasks.base import told_classes
from trainkit.training.train_state import TrainState

NAMES = tuple(f"class {label}" for label in range(7))


def called(parts: TrainState, names: tuple[str, ...]) -> Splits:
    return replace(parts.splits, info=replace(parts.splits.info, class_names=names))


def test_a_checkpoint_says_its_classes_and_other_data_does_not_go_on_from_it(tmp_path: Path) -> None:
    parts = parts_of()
    keeper = keeper_of(parts, tmp_path / "run", Progress())
    keeper.save()
    assert format.manifest_of(tmp_path / "run" / "checkpoints", 0).state["classes"] == list(NAMES)
    restored, _ = go_on(parts, keeper.checkpoints)
    assert restored is not None
    others = replace(parts, splits=called(parts, ("class 0", "an apple", *NAMES[2:])))
    with pytest.raises(UserError, match="other classes than the checkpoint") as error:
        go_on(others, keeper.checkpoints)
    assert error.value.why.startswith("Class 1 was 'class 1' in training, and in the data is 'an apple'")


def test_a_checkpoint_that_does_not_say_its_classes_is_gone_on_from(tmp_path: Path) -> None:
    """As one of an earlier trainkit."""
    parts = parts_of()
    assert told_classes(parts.splits) == {"classes": list(NAMES)}
    assert told_classes(replace(parts.splits, train=[])) == {}, "a peer without data does not make up classes"
    many = replace(parts, splits=called(parts, tuple(f"{name} {'long' * 100_000}" for name in NAMES)))
    keeper = keeper_of(many, tmp_path / "run", Progress())
    keeper.save()
    restored, _ = go_on(parts, keeper.checkpoints)
    assert restored is not None
    assert "classes" not in restored.state


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on folders named cat, dog and eel."""
    home = tmp_path_factory.mktemp("pets")
    for label, name in enumerate(("cat", "dog", "eel")):
        (home / "photos" / name).mkdir(parents=True)
        for number in range(8):
            shade = torch.randint(256, (3,), generator=torch.Generator().manual_seed(8 * label + number)).tolist()
            Image.new("RGB", (16, 16), tuple(shade)).save(home / "photos" / name / f"{number}.png")
    data = ("data.name=image_folder", f"data.root={home / 'photos'}", "data.image_size=16", "data.workers=0")
    run_ranks(1, train_run, home / "run", "single", (*data, "train.max_steps=2", "train.global_batch_size=8"))
    return home


def told(pets: Path, folder: str, *more: str) -> tuple[list[list[str]], str]:
    done = run_command("predict", "run", folder, *more, cwd=pets)
    assert done.returncode == 0, done.stderr
    return [row[1:] for row in csv.reader(done.stdout.splitlines())], done.stderr


def test_images_keep_the_names_of_training_where_the_data_was_renamed(pets: Path) -> None:
    photos = pets / "photos"
    before, said = told(pets, "photos")
    assert "in training" not in said
    (photos / "dog").rename(photos / "aardvark")  # and now stands before cat
    try:
        for more in ((), (f"data.root={photos}",)):
            after, said = told(pets, "photos", *more)
            assert sorted(map(tuple, after)) == sorted(map(tuple, before))
        assert (
            "Classes have the names of the training; class 0 was 'cat' in training, and in the data is 'aardvark'"
            in said
        )
        done = run_command("evaluate", "run", cwd=pets)
        assert done.returncode == 2
        assert re.search(r"^The data in .*photos has other classes.*\n  why: Class 0 was 'cat'.*\n  fix: ", done.stderr)
    finally:
        (photos / "aardvark").rename(photos / "dog")


def as_of_before(run: Path) -> None:
    """Make its checkpoints those of a trainkit that named their classes only."""
    for folder in (run / "checkpoints").glob("step-*"):
        record = format.manifest_of(folder.parent, int(folder.name[5:]))
        state = {key: value for key, value in record.state.items() if key != "input"}
        (folder / "state.json").write_text(replace(record, state=state).to_json())


def test_predicting_needs_no_data_but_with_a_checkpoint_of_before(pets: Path) -> None:
    before, _ = told(pets, "photos")
    (pets / "photos").rename(pets / "elsewhere")
    shutil.copytree(pets / "run", pets / "old")
    as_of_before(pets / "old")
    try:
        after, _ = told(pets, "elsewhere")
        assert after == before
        done = run_command("predict", "old", "elsewhere", cwd=pets)
        assert done.returncode == 2
        assert "photos" in done.stderr
        assert "Traceback" not in done.stderr
        moved = run_command("predict", "old", "elsewhere", f"data.root={pets / 'elsewhere'}", cwd=pets)
        assert [row[1:] for row in csv.reader(moved.stdout.splitlines())] == before
    finally:
        (pets / "elsewhere").rename(pets / "photos")
