"""Names of splits: which words mean which, in folders, tables and files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.data.samples import build, choice, write_images
from trainkit.common.errors import UserError
from trainkit.data.folders import by_split, folders_of_splits, require_one_word, split_named, split_of
from trainkit.data.registry import check_data, train_size


@pytest.mark.parametrize(
    ("names", "split"),
    [(("train", "training", "Train", "TRAINING", "training_set", "Train Set", "trainset", " train "), "train"),
     (("val", "valid", "validation", "dev", "eval", "Valid", "DEV", "eval_set", "validation-set"), "val"),
     (("test", "testing", "Testing", "TEST", "test_set"), "test"),
     (("", "trains", "train_old", "tester", "latest", "invalid", "value", "device", "set", "cat", "train2"), None)],
)  # fmt: skip
def test_a_folder_is_a_split_if_its_whole_name_says_so(names: Sequence[str], split: str | None) -> None:
    assert {name: split_named(name) for name in names} == dict.fromkeys(names, split)


@pytest.mark.parametrize(
    ("path", "split"),
    [("data/train-00000-of-00002.parquet", "train"), ("dev.tar", "val"), ("eval_set/000000.tar", "val"),
     ("TESTING/0.tar", "test"), ("Valid-0001.tar", "val"), ("imagenet.train.000.tar", "train"),
     ("test/train-0.tar", "train"), ("my_valid.parquet", "val"), ("val0000.parquet", "val"), ("val2017/0.tar", "val"),
     ("photos/test_set/0.tar", "test"), ("shards/training", "train"), ("latest-0.tar", None),
     ("constraint/0.tar", None), ("developer.tar", None), ("tests.tar", None), ("0000.parquet", None)],
)  # fmt: skip
def test_a_file_belongs_to_the_split_that_its_path_names_last(path: str, split: str | None) -> None:
    assert split_of(path) == split


FOLDERS: list[tuple[Mapping[str, Sequence[str]], Mapping[str, str] | str]] = [
    # Folder -> the folders in it; split -> folder, or what the refusal says.
    ({"train": "ab", "valid": "ab", "test": "ab"}, {"train": "train", "val": "valid", "test": "test"}),
    ({"Training": "ab", "Testing": "ab"}, {"train": "Training", "test": "Testing"}),
    ({"TRAIN": "ab", "dev": "ab"}, {"train": "TRAIN", "val": "dev"}),
    ({"train": "ab", "extra": "ab"}, {"train": "train"}),
    ({"training_set": "ab", "test_set": ""}, {"train": "training_set", "test": "test_set"}),
    ({"train": "", "test": "", "other": ""}, {"train": "train", "test": "test"}),
    ({"train": ""}, {"train": "train"}),
    ({"cat": "", "dog": ""}, {}),
    ({"bus": "", "car": "", "train": ""}, {}),
    ({"control": "", "test": ""}, {}),
    ({"control": ["p1"], "test": ["p2"]}, {}),
    ({"invalid": "", "valid": ""}, {}),
    ({}, {}),
    ({"train": "ab", "val": "ab", "valid": "ab"}, "two folders for the split val: val and valid"),
    ({"Train": "ab", "train": "ab"}, "two folders for the split train: Train and train"),
    ({"train": "ab", "eval": "ab", "dev": "ab", "x": "a"}, "two folders for the split val: dev and eval"),
    ({"a": "", "b": "", "test": "ab"}, "no folder train beside test"),
    ({"valid": "ab", "test": "ab"}, "no folder train beside valid"),
]


@pytest.mark.parametrize(("folders", "expected"), FOLDERS)
def test_folders_are_splits_or_classes(folders: Mapping[str, Sequence[str]], expected: Mapping[str, str] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(UserError, match=f"photos has {expected}"):
            folders_of_splits(list(folders), folders.__getitem__, "photos")
        return
    assert folders_of_splits(list(folders), folders.__getitem__, "photos") == expected


def test_a_class_is_not_listed_to_tell_splits_from_classes() -> None:
    asked: list[str] = []

    def inside(name: str) -> Sequence[str]:
        asked.append(name)
        return ()

    folders_of_splits(["bus", "car", "train"], inside, "photos")
    assert asked == ["train"]


def test_files_call_a_split_by_one_word() -> None:
    require_one_word(["val-0.tar", "VAL-1.tar", "val_set/2.tar", "train-0.tar", "test.tar"], "shards")
    with pytest.raises(UserError, match="shards has two names for the split val: dev and val"):
        require_one_word(["train-0.tar", "val-0.tar", "dev-0.tar"], "shards")


def test_splits_come_in_their_order() -> None:
    assert list(by_split(["Testing", "cat", "dev", "Train"], "photos").items()) == [
        ("train", "Train"), ("val", "dev"), ("test", "Testing"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("splits", "sizes"),
    [(("Training", "Testing"), [16, 4, 8]), (("train", "valid"), [20, 8, 8]), (("TRAIN", "Dev", "test"), [20, 8, 8])],
)
def test_images_are_trained_on_and_counted_as_their_folders_are_called(
    splits: Sequence[str], sizes: Sequence[int], tmp_path: Path
) -> None:
    for at, split in enumerate(splits):
        write_images(tmp_path / split, {"cat": 4 if at else 10, "dog": 4 if at else 10})
    for name in ("__MACOSX/cat", "@eaDir", "train-256.pack"):
        (tmp_path / name).mkdir(parents=True)
    data = build("image_folder", tmp_path, all_kinds=True)
    assert [len(part) for part in (data.train, data.val, data.test)] == sizes
    assert data.info.class_names == ("cat", "dog")
    assert train_size(choice("image_folder", tmp_path)) == sizes[0]


def test_a_run_of_before_keeps_the_splits_that_it_began_with(tmp_path: Path) -> None:
    write_images(tmp_path / "one" / "train", {"cat": 10, "dog": 10})
    write_images(tmp_path / "one" / "valid", {"cat": 4, "dog": 4})
    write_images(tmp_path / "one" / "train" / "cat" / "@eaDir", {"x.jpg": 1})
    data = build("image_folder", tmp_path / "one", all_kinds=False)
    assert [len(part) for part in (data.train, data.val)] == [17, 4]
    for split in ("Training", "Testing"):
        write_images(tmp_path / "other" / split, {"cat": 10, "dog": 10})
    data = build("image_folder", tmp_path / "other", all_kinds=False)
    assert data.info.class_names == ("Testing", "Training")


def test_a_folder_around_the_splits_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "photos-v2" / "train", {"cat": 2, "dog": 2})
    with pytest.raises(UserError) as caught:
        check_data(choice("image_folder", tmp_path))
    assert caught.value.fix.endswith(f"data.root={tmp_path / 'photos-v2'}.")
    check_data(choice("image_folder", tmp_path / "photos-v2"))
