"""Data sets that others keep: torchvision's, by the name of their class; Hugging Face's, from a hub on this machine."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torchvision
from PIL import Image

from jobs import prepare
from tests import readme
from tests.data.samples import build, choice, hub, sizes, write_images
from tests.shell import python
from trainkit.common.errors import UserError
from trainkit.data.datasets import huggingface
from trainkit.data.folders import split_of
from trainkit.data.image_files import ImageFiles
from trainkit.data.parquet import Columns
from trainkit.data.registry import build_data, check_data, guessed, prepare_data
from trainkit.data.tensors import TensorSamples

# torchvision's


def test_a_data_set_of_torchvision_is_read_by_its_name(prepared: Path) -> None:
    data = build("torchvision", prepared, dataset="FashionMNIST", in_chans=1)
    theirs = torchvision.datasets.FashionMNIST(str(prepared), train=False)
    assert (sizes(data), list(data.info.class_names)) == ([70, 10, 80], theirs.classes)
    assert (data.info.image_size, data.in_memory) == (28, True)
    assert isinstance(data.test, TensorSamples)
    for index in (0, 41):
        picture, label = theirs[index]
        assert data.test[index][1] == label
        assert data.test[index][0].flatten().tolist() == numpy.asarray(picture).flatten().tolist()
    assert isinstance(data.train, TensorSamples)
    levels = data.train.images.double() / 255
    assert data.info.mean == pytest.approx([levels.mean().item()], abs=1e-4)
    assert data.info.std == pytest.approx([levels.std().item()], abs=1e-4)


def test_digits_and_signs_are_not_mirrored(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared / "FashionMNIST", tmp_path / "MNIST")
    for name, flips in (("MNIST", False), ("FashionMNIST", True)):
        data = build("torchvision", tmp_path if name == "MNIST" else prepared, dataset=name)
        assert data.train_transform.flip is flips  # type: ignore[attr-defined]


def test_photos_of_torchvision_have_its_splits_or_are_split(tmp_path: Path) -> None:
    write_images(tmp_path / "food-101" / "images", {"cake": 12, "pie": 12}, size=(60, 40))
    (tmp_path / "food-101" / "meta").mkdir()
    for split, numbers in (("train", range(9)), ("test", range(9, 12))):
        listed = {name: [f"{name}/{number:03}" for number in numbers] for name in ("cake", "pie")}
        (tmp_path / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(listed))
    food = build("torchvision", tmp_path, dataset="Food101", image_size=32)
    assert (sizes(food), food.info.class_names) == ([16, 2, 6], ("cake", "pie"))
    assert tuple(food.train_transform(food.train[0][0]).shape) == (3, 32, 32)
    write_images(tmp_path / "eurosat" / "2750", {"Forest": 12, "River": 12}, size=(64, 64))
    euro = build("torchvision", tmp_path, dataset="EuroSAT")
    assert (sizes(euro), euro.info.image_size, euro.info.class_names) == ([16, 4, 4], 224, ("Forest", "River"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("CIFAR-100", r"Did you mean 'CIFAR100'\?"),
     ("CIFAR100", r"is not in .*nowhere[\s\S]*jobs\.prepare torchvision data\.dataset=CIFAR100 --root .*nowhere"),
     ("EMNIST", r"torchvision's EMNIST takes root, split\.[\s\S]*your own function around it"),
     ("FakeData", r"torchvision's FakeData takes \."), ("Kitti", "Kitti")],
)  # fmt: skip
def test_what_torchvision_cannot_give_is_refused(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says) as caught:
        build("torchvision", tmp_path / "nowhere", dataset=name)
    assert caught.value.key == "data.dataset"


def test_a_data_set_that_stands_for_many_is_named_when_it_is_prepared(prepared: Path, tmp_path: Path) -> None:
    for wrong, says in (({}, "needs 'data.dataset'"), ({"dataset": "CIFAR"}, "Did you mean"),
                        ({"dataset": "CIFAR10", "sise": 3}, r"Unknown key 'data\.sise'")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            prepare_data("torchvision", tmp_path, [], print, wrong)
    with pytest.raises(UserError, match=r"data\.image_size has no effect on prepare"):
        prepare_data("digits", tmp_path, [], print, {"image_size": 3})
    with pytest.raises(UserError, match="cannot be packed"):
        prepare.main(["torchvision", "data.dataset=FashionMNIST", "--root", str(prepared), "--pack", "64"], {})


# Hugging Face's

pyarrow = pytest.importorskip("pyarrow", reason="the extra hf")
FEATURES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["tabby cat", "dog/wolf", "none"]}}


def parquet(
    labels: list[Any], *, features: dict[str, Any] | None = FEATURES, size: tuple[int, int] = (30, 20)
) -> bytes:
    """A file as `datasets` writes it: images as bytes with a path, numbers as labels, and what they mean."""
    from pyarrow import parquet

    rows = []
    for number, label in enumerate(labels):
        content = io.BytesIO()
        Image.new("RGB", size, (number, 0, 0)).save(content, ("PNG", "JPEG")[number % 2])
        rows.append({"image": {"bytes": content.getvalue(), "path": f"../../{number}"}, "label": label})
    table = pyarrow.Table.from_pylist(rows)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    out = io.BytesIO()
    parquet.write_table(table, out)
    return out.getvalue()


def prepared_from(files: dict[str, bytes], folder: Path, *words: str, dataset: str = "me/pets") -> tuple[int, str]:
    """``trainkit prepare`` in a process of its own, whose client of the hub asks the stand-in."""
    given = ("huggingface", f"data.dataset={dataset}", *words, "--root", str(folder / "data"))
    with hub(files) as url:
        env = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hf"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = python("-m", "jobs.prepare", *given, cwd=folder, **env)
    return done.returncode, done.stdout + done.stderr


FILES = {
    "README.md": b"",
    "data/train-00000-of-00002.parquet": parquet([0, 1] * 8),
    "data/train-00001-of-00002.parquet": parquet([1, 0] * 2),
    "data/validation-00000-of-00001.parquet": parquet([0, 1]),
    "data/test-00000-of-00001.parquet": parquet([-1, -1]),
}


def test_a_data_set_of_the_hub_is_fetched_and_trained_on_by_its_name(tmp_path: Path) -> None:
    code, said = prepared_from(FILES, tmp_path)
    assert code == 0, said
    assert "is complete: train 20, val 2 images." in said
    assert f"Train on it: data.name=huggingface data.dataset=me/pets data.root={tmp_path / 'data'}" in said
    config = choice("huggingface", tmp_path / "data", dataset="me/pets")
    check_data(config)
    assert guessed(config)["image_size"][0] == 20
    data = build_data(config)
    assert sizes(data) == [20, 2, 2], "a test without labels is none"
    assert data.info.class_names == ("dog_wolf", "tabby cat")
    assert isinstance(data.train, ImageFiles)
    names = sorted(data.train.files.path(at) for at in data.train.positions)
    assert (names[0], names[-1]) == ("train/dog_wolf/00000001.jpg", "train/tabby cat/00000019.jpg")
    assert not list(tmp_path.rglob("*.parquet")), "the images are there once"
    assert "already exists" in prepared_from({}, tmp_path)[1]


@pytest.mark.nightly
def test_the_commands_for_the_hub_work_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lines,) = readme.blocks("hub", readme.DOCS / "own.md", typed=True)
    files = {"data/train-0.parquet": parquet([0, 1] * 60), "data/test-0.parquet": parquet([0, 1])}
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub(files, "AI-Lab-Makerere/beans") as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        for line in lines:
            done = readme.type_in(line, tmp_path)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert "test acc1" in done.stdout


def test_files_fetched_elsewhere_do_without_the_hub(tmp_path: Path) -> None:
    (tmp_path / "train-0.parquet").write_bytes(parquet(["cat", "dog", ".", None] * 3, features=None))
    words = ("--archive", str(tmp_path / "train-0.parquet"))
    code, said = prepared_from({}, tmp_path, *words)
    assert (code, "There are 3 without a label (train-0.parquet, row 3)" in said) == (2, True), said
    code, said = prepared_from({}, tmp_path, "data.max_broken=3", *words)
    assert (code, "is complete: train 9 images" in said) == (0, True), said
    assert build("huggingface", tmp_path / "data", dataset="me/pets").info.class_names == ("_", "cat", "dog")


@pytest.mark.parametrize(
    ("files", "words", "says"),
    [
        ({}, (), "me/pets has no training images"),
        ({"a/train-0.parquet": b"", "b/train-0.parquet": b""}, (), r"me/pets has several configurations"),
        ({"a/train-0.parquet": b"", "b/train-0.parquet": b""}, ("data.config=c",), "me/pets has no configuration 'c'"),
        ({"train-0.parquet": b"torn"}, (), "is not a parquet file of images"),
        ({"train-0.parquet": parquet([0, 1])}, ("data.label=kind",), "has no column of labels"),
        ({"train-0.parquet": parquet([0, 1], features=None)}, ("data.image=photo",), "has no column of images"),
    ],
)  # fmt: skip
def test_what_the_hub_has_not_is_named_and_nothing_half_is_left(
    files: dict[str, bytes], words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    code, said = prepared_from(files, tmp_path, *words)
    assert (code, says in said) == (2, True), said
    assert "Traceback" not in said
    with pytest.raises(UserError, match=r"jobs\.prepare huggingface data\.dataset=me/pets"):
        check_data(choice("huggingface", tmp_path / "data", dataset="me/pets"))


def test_a_data_set_that_is_not_in_the_hub_is_named_with_the_ways_out(tmp_path: Path) -> None:
    code, said = prepared_from({}, tmp_path, dataset="me/gone")
    assert (code, "The data set 'me/gone' could not be fetched." in said) == (2, True), said
    assert "HF_TOKEN" in said


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r'pip install "trainkit-vision\[hf\]"'):
        prepare_data("huggingface", tmp_path, [], print, {"dataset": "me/pets"})


@pytest.mark.parametrize(
    ("name", "split", "part"),
    [("data/train-00000-of-00002.parquet", "train", "data"),
     ("mnist/validation-00000-of-00001.parquet", "val", "mnist"), ("default/test/0000.parquet", "test", "default"),
     ("train/0000.parquet", "train", ""), ("training/x.parquet", "train", ""), ("eval_set/x.parquet", "val", ""),
     ("trains/x.parquet", None, "trains"), ("my_valid.parquet", "val", ""), ("val0000.parquet", "val", "")],
)  # fmt: skip
def test_a_file_of_the_hub_belongs_to_a_split_and_a_part(name: str, split: str | None, part: str) -> None:
    assert (split_of(name), huggingface.part_of(name)) == (split, part)


def test_names_that_are_no_folders_and_names_alike_stay_apart() -> None:
    columns = Columns("image", "label", ["a/b", "A_b", ".git", "x" * 200], numbers=False)
    unpacking = huggingface._Unpacking(Path(), None, None)
    assert [unpacking._class_folder(at, columns) for at in range(4)] == ["a_b-0", "A_b-1", "_git", "x" * 100]
    with pytest.raises(UserError, match=r"Two classes would share one folder: '\.git' and '_git'"):
        unpacking._class_folder("_git", columns._replace(names=[]))
