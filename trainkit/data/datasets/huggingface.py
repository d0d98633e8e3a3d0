"""Images in the hub of Hugging Face: parquet files, unpacked into ROOT/huggingface/NAME/SPLIT/CLASS."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.data import folders, image_files, image_kinds, losses, parquet
from trainkit.data.base import Splits, missing
from trainkit.data.download import Say, complete_folder
from trainkit.data.folders import SPLITS, HeldOut, Layout, split_named, split_of
from trainkit.data.image_files import Files
from trainkit.data.losses import Counts, LostSamples, SplitCounts
from trainkit.data.order import size_left
from trainkit.data.photo_transforms import Photos

COUNTS = "counts.json"
"""Beside the images: how many there are of each class, and what was left out."""


def build(
    files: Files, *, dataset: str, config: str | None = None, image: str | None = None, label: str | None = None,
    photos: Photos, fractions: HeldOut,
) -> Splits:  # fmt: skip
    """Without validation images, some training images are held out; without test images, val is also the test split.

    ``dataset``: OWNER/NAME in the hub. ``config``: one of its configurations, if it has several. ``image``: the column
    of the images; null: the first one with images. ``label``: the column of the classes; null: the first one with class
    names.
    """
    return folders.folder_splits("huggingface", files, photos, fractions)


def layout(root: Path, *, dataset: str, config: str | None = None, **others: Any) -> Layout:
    """The folder of the images, and its splits."""
    names = (dataset, config) if config is not None else (dataset,)
    return root / "huggingface" / re.sub(r"[^\w.-]", "--", "/".join(names)).lstrip("."), ("train", "val", "test")


def locate(
    root: Path, *, dataset: str, config: str | None, image: str | None, label: str | None, **others: Any
) -> None:
    """Check that it is unpacked."""
    folder, _ = layout(root, dataset=dataset, config=config)
    if not image_files.class_folders(folder / "train"):
        what = f"The data set '{dataset}' is not in {root}."
        given = {"dataset": dataset, "config": config, "image": image, "label": label}
        raise missing("huggingface", root, folder / "train" / "CLASS", what=what, key="dataset", given=given)


def train_size(root: Path, *, val_fraction: float, **options: Any) -> int | None:
    """Images to train on; None where counting them would take long."""
    folder, _ = layout(root, **options)
    return folders.train_size(folder, val_fraction)


def some_images(root: Path, **options: Any) -> list[Path]:
    """List some of the images to train on."""
    return folders.some_of(layout(root, **options)[0] / "train")


def counts(root: Path, *, val_fraction: float, **options: Any) -> Counts:
    """Count what is read of each split, and what is not: the files, where that was not kept when it was unpacked."""
    folder, splits = layout(root, **options)
    kept = fileio.read_object(folder / COUNTS)
    found: dict[str, SplitCounts] = {}
    try:
        of_train = {str(name): int(count) for name, count in kept["train"]["classes"].items()}
        for split in SPLITS:
            of_class = kept[split]["classes"]
            left_out = losses.from_pairs(kept[split]["left_out"])
            found[split] = SplitCounts(sum(map(int, of_class.values())), len(of_class), left_out)
    except (AttributeError, KeyError, TypeError, ValueError):  # it is older, or somebody else wrote that file
        of_train = {}
    if not of_train:
        return folders.counts((folder, splits), (val_fraction, 0.0))
    if not found["val"].images:
        whole = found["train"]
        rest = size_left(of_train.values(), (val_fraction,))
        found["train"] = whole._replace(images=rest)
        found["val"] = SplitCounts(whole.images - rest, whole.classes, found["val"].left_out, losses.SPLIT_OFF)
    if not found["test"].classes:
        found["test"] = found["test"]._replace(note=losses.NO_TEST)
    return found


def prepare(
    root: Path, archives: list[Path], say: Say, *, dataset: str, config: str | None, max_broken: int, **others: Any
) -> None:
    """Download the parquet files, or take them from ``archives``, and unpack their images. A killed call goes on."""
    final, _ = layout(root, dataset=dataset, config=config)
    if (final / "train").is_dir():
        say(f"{final} already exists.")
        return
    parquet.require_pyarrow()  # before the long work
    with complete_folder(final, keep=True) as partial:
        fetched = partial / ".parquet"
        files = _given(archives) or _fetched(dataset, config, fetched, say)
        folders.require_one_word(files, dataset)
        for split in SPLITS:
            shutil.rmtree(partial / split, ignore_errors=True)
        unpacking = _Unpacking(partial, others["image"], others["label"])
        for name, file in files.items():
            say(f"Unpacking {name}")
            unpacking.unpack(file, split_of(name) or "")
        unpacking.require_whole(dataset, max_broken, files)
        about = {split: {"classes": unpacking.of_class[split], "left_out": unpacking.lost[split]} for split in SPLITS}
        fileio.write(partial / COUNTS, json.dumps(about))
        shutil.rmtree(fetched, ignore_errors=True)
    images = [f"{split} {counts.total():,}" for split, counts in unpacking.of_class.items() if counts]
    say(f"{final} is complete: {', '.join(images)} images.")


def _given(archives: Sequence[Path]) -> dict[str, Path]:
    """Path -> file, of files that were fetched elsewhere. Raises UserError for one of no split."""
    files: dict[Path, Path] = {}
    for file in archives:
        path = file.absolute()
        # The hub calls a part of a large split partial-train.
        if split_of(path.name) is None and split_named(path.parent.name.removeprefix("partial-")) is None:
            why = f"Neither its name nor its folder contains one of: {folders.LISTED}."
            fix = "Rename it, such as train-0.parquet, or put it into a folder such as train."
            raise UserError(f"{file} belongs to no split.", why=why, fix=fix)
        files.setdefault(path.resolve(), path)
    return {str(path): path for path in files.values()}


def _fetched(dataset: str, config: str | None, folder: Path, say: Say) -> dict[str, Path]:
    """Name in the hub -> file in ``folder``, of all parquet files of a data set, or of one part of it."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        for revision in ("main", "refs/convert/parquet"):  # the hub itself converts those of other kinds
            listed = HfApi().list_repo_files(dataset, repo_type="dataset", revision=revision)
            there = [name for name in listed if name.endswith(".parquet")]
            if any(map(split_of, there)):
                break
        part = _part(dataset, config, sorted({part_of(name) for name in there if split_of(name)}))
        files: dict[str, Path] = {}
        others: list[str] = []
        for name in there:
            if part_of(name) != part:
                continue
            if not split_of(name):
                others.append(name)
                continue
            say(f"Downloading {name} of {dataset}")
            path = hf_hub_download(dataset, name, repo_type="dataset", revision=revision, local_dir=folder)
            files[name] = Path(path)
    except UserError:
        raise
    except Exception as error:  # the client raises those of two libraries of HTTP, and its own
        fix = (
            "Check its name; for a private one set HF_TOKEN. Without internet, fetch its parquet files elsewhere, and "
        )
        what = f"The data set '{dataset}' could not be fetched."
        why = terminal.one_line(error, 300) or type(error).__name__
        raise UserError(what, why=why, fix=f"{fix}give them with --archive.") from None
    if others:
        say(f"Left out: {len(others)} files without the name of a split ({terminal.one_line(others[0], 200)}).")
    return files


def _part(dataset: str, config: str | None, parts: Sequence[str]) -> str | None:
    """The part of a data set to take: ``config``, else the only one or one of a usual name."""
    part = config
    if config is None:
        usual = [name for name in ("default", "data", "") if name in parts]
        part = next(iter(parts if len(parts) == 1 else usual), None)
    if parts and part not in parts:
        what = (
            f"{dataset} has several configurations."
            if config is None
            else f"{dataset} has no configuration '{config}'."
        )
        raise UserError(what, why=f"They are: {', '.join(parts)}.", fix="Choose one with data.config=NAME.")
    return part


def part_of(name: str) -> str:
    """The part of a data set that a file of it belongs to: its first folder, which may also be a split's."""
    first = name.rpartition("/")[0].partition("/")[0]
    return "" if split_named(first) else first


class _Unpacking:
    """Writes the images of parquet files to SPLIT/CLASS in a folder, and counts them.

    The folder of a class has its name, as far as a file system takes it; with its number where two would be one.
    """

    def __init__(self, folder: Path, image: str | None, label: str | None) -> None:
        self.folder = folder
        self.columns = (image, label)
        self.of_class = {split: Counter[str]() for split in SPLITS}
        self.lost = {split: LostSamples() for split in SPLITS}
        self._folders: dict[Any, str] = {}
        """Label, or number of a class that has a name -> folder."""
        self._classes: dict[str, str] = {}
        """Folder -> class."""

    def unpack(self, file: Path, split: str) -> None:
        """Add a file to a split."""
        of_class = self.of_class[split]
        left = LostSamples()
        opened = parquet.opened(file, file.name, *self.columns, lost=left, may_lack_labels=split == "test")
        with opened as (known, rows):
            for number, (data, value) in enumerate(rows, start=of_class.total()):
                name = self._class_folder(value, known)
                where = self.folder / split / name
                fileio.make_folder(where)
                end = image_kinds.ending_for(data[: image_kinds.START])
                with fileio.create(where / f"{number:08}.{end}") as out:
                    out.write(data)
                of_class[name] += 1
        self.lost[split].add(left, f"{file.name}, ")

    def _class_folder(self, value: Any, columns: parquet.Columns) -> str:
        word = columns.word(value)
        key = value if columns.names else word
        if key in self._folders:
            return self._folders[key]
        folder = _safe(word)
        alike = [name for name in columns.names if _safe(name).casefold() == folder.casefold()]
        if len(alike) > 1:
            folder = f"{folder}-{value}"
        if self._classes.setdefault(folder, word) != word:
            both = terminal.one_line(f"{self._classes[folder]!r} and {word!r}", 200)
            why = "A folder's name cannot have a slash, a backslash or a leading dot."
            fix = "Rename one of them, or read the parquet files without unpacking: data.name=stream."
            raise UserError(f"Two classes would share one folder: {both}.", why=why, fix=fix)
        self._folders[key] = folder
        return folder

    def require_whole(self, dataset: str, max_broken: int, files: Mapping[str, Path]) -> None:
        """Refuse what training would refuse, and what loses more than ``max_broken`` images."""
        known = self.of_class["train"]
        lost = self.lost["train"]
        if not known:
            why = f"Files read: {', '.join(files)[:300] or 'none'}."
            if lost:
                why = f"There are {image_kinds.left_out_in_words(lost)}."
            fix = "Use a data set with a split 'train' whose images have one label."
            raise UserError(f"{dataset} has no training images.", why=why, fix=fix)
        folders.require_classes(Path(dataset), known)
        for split in ("val", "test"):
            for unknown in sorted(self.of_class[split].keys() - known.keys()):
                what = f"{split} of {dataset} has a class that train does not have: {terminal.one_line(unknown, 100)}."
                why = f"train has: {terminal.one_line(', '.join(sorted(known)), 200)}."
                raise UserError(what, why=why, fix="Choose another column with data.label=COLUMN.", key="data.label")
        counted = [lost, self.lost["val"]]
        if self.of_class["test"] or self.lost["test"].keys() != {losses.NO_LABEL}:  # else there is no test split
            counted.append(self.lost["test"])
        losses.refuse(losses.summed(counted), max_broken, dataset)


def _safe(name: str) -> str:
    return re.sub(r"[/\0\\]|^\.", "_", name.strip())[:100] or "_"
