"""Images in the hub of Hugging Face: parquet files, unpacked into ROOT/huggingface/NAME/SPLIT/CLASS."""

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trainkit import fileio, terminal
from trainkit.data import folders, parquet
from trainkit.data.base import Splits, missing
from trainkit.data.download import Say, complete_folder
from trainkit.data.folders import SPLIT_NAMES, Files, Layout, split_of
from trainkit.errors import UserError

_KINDS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp",
          b"II*\0": ".tif", b"MM\0*": ".tif"}  # fmt: skip


def build(
    files: Files,
    *,
    dataset: str,
    config: str | None = None,
    image: str | None = None,
    label: str | None = None,
    image_size: int = 224,
    in_chans: Literal[1, 3] = 3,
    augment: bool = True,
    val_fraction: float = 0.15,
    test_fraction: float = 0.15,
    exif: bool = False,
) -> Splits:
    """Without validation images some are split off train, without test images test is val.

    ``dataset``: OWNER/NAME in the hub. ``config``: one of its parts, where it has several. ``image``: the column of the
    images; null: the first that has some. ``label``: that of the classes; null: the first that names some.
    ``image_size``: pixels of a side; a new run without it takes the median of the shorter sides, up to 224. ``exif``:
    turn photos upright, as their EXIF data says.
    """
    fractions, options = (val_fraction, test_fraction), {"augment": augment, "exif": exif}
    return folders.folder_splits("huggingface", files, image_size, in_chans, fractions, **options)


def layout(root: Path, *, dataset: str, config: str | None = None, **others: Any) -> Layout:
    """The folder of the images, and its splits."""
    names = (dataset, config) if config is not None else (dataset,)
    return root / "huggingface" / re.sub(r"[^\w.-]", "--", "/".join(names)).lstrip("."), ("train", "val", "test")


def locate(
    root: Path, *, dataset: str, config: str | None, image: str | None, label: str | None, **others: Any
) -> None:
    """Check that it is unpacked."""
    folder, _ = layout(root, dataset=dataset, config=config)
    if not folders.class_folders(folder / "train"):
        what, absent = f"The data set '{dataset}' is not in {root}.", folder / "train" / "CLASS"
        given = {"dataset": dataset, "config": config, "image": image, "label": label}
        raise missing("huggingface", root, absent, what=what, key="dataset", given=given)


def train_size(root: Path, *, dataset: str, config: str | None, val_fraction: float, **others: Any) -> int | None:
    """Images to train on; None where counting them would take long."""
    folder, _ = layout(root, dataset=dataset, config=config)
    return folders.train_size(folder, val_fraction)


def some_images(root: Path, *, dataset: str, config: str | None, **options: Any) -> list[Path]:
    """Of those to train on."""
    return folders.some_of(layout(root, dataset=dataset, config=config)[0] / "train")


def prepare(
    root: Path, archives: list[Path], say: Say, *, dataset: str, config: str | None, image: str | None,
    label: str | None, **others: Any,
) -> None:  # fmt: skip
    """Download the parquet files, or take them from ``archives``, and unpack their images. A killed call goes on."""
    final, _ = layout(root, dataset=dataset, config=config)
    if (final / "train").is_dir():
        say(f"{final} is already there.")
        return
    parquet.require_pyarrow()  # before the long work
    with complete_folder(final, keep=True) as partial:
        fetched = partial / ".parquet"
        files = {file.name: file for file in archives} or _fetched(dataset, config, fetched, say)
        counts = Counter[str]()
        for split in dict.fromkeys(SPLIT_NAMES.values()):
            shutil.rmtree(partial / split, ignore_errors=True)
        for name, file in files.items():
            if (belongs := split_of(name)) is not None:
                say(f"Unpacking {name}")
                counts[belongs] += _unpack(file, partial / belongs, image, label, counts[belongs])
        if not counts["train"]:
            what, why = f"{dataset} has no images to train on.", f"Looked at: {', '.join(files)[:300] or 'no file'}."
            raise UserError(what, why=why, fix="Give a data set with a split 'train', whose images have one label.")
        shutil.rmtree(fetched, ignore_errors=True)
    say(f"{final} is complete: {', '.join(f'{split} {count:,}' for split, count in counts.items() if count)} images.")


def _fetched(dataset: str, config: str | None, folder: Path, say: Say) -> dict[str, Path]:
    """Name in the hub -> file in ``folder``, of all parquet files of a data set, or of one part of it."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        for revision in ("main", "refs/convert/parquet"):  # the hub itself converts those of other kinds
            listed = HfApi().list_repo_files(dataset, repo_type="dataset", revision=revision)
            if found := [name for name in listed if name.endswith(".parquet") and split_of(name)]:
                break
        parts = sorted(set(map(part_of, found)))
        usual = parts if len(parts) == 1 else [part for part in ("default", "data", "") if part in parts]
        part = next(iter(usual), None) if config is None else config
        if found and part not in parts:
            what = f"{dataset} has no part '{config}'." if config is not None else f"{dataset} has several parts."
            raise UserError(what, why=f"They are: {', '.join(parts)}.", fix="Choose one with data.config=NAME.")
        files = {}
        for name in (name for name in found if part_of(name) == part):
            say(f"Downloading {name} of {dataset}")
            path = hf_hub_download(dataset, name, repo_type="dataset", revision=revision, local_dir=folder)
            files[name] = Path(path)
        return files
    except UserError:
        raise
    except Exception as error:  # the client raises those of two libraries of HTTP, and its own
        fix = "Check its name; for a private one set HF_TOKEN. Without internet fetch its parquet files elsewhere, and "
        what, why = f"The data set '{dataset}' could not be fetched.", terminal.one_line(error, 300)
        raise UserError(what, why=why or type(error).__name__, fix=f"{fix}give them with --archive.") from None


def part_of(name: str) -> str:
    """The part of a data set that a file of it belongs to: its first folder, which may also be a split's."""
    first = name.rpartition("/")[0].partition("/")[0]
    return "" if first in SPLIT_NAMES else first


def _unpack(file: Path, folder: Path, image: str | None, label: str | None, first: int) -> int:
    """Write the images of a parquet file to ``folder``/CLASS, numbered from ``first``; how many there were."""
    count = 0
    with parquet.opened(file, file.name, image, label) as (columns, rows):
        for data, value in rows:
            end = next((end for start, end in _KINDS.items() if data.startswith(start)), ".png")
            where = folder / _folder_of(value, columns.names)
            fileio.make_folder(where)
            with fileio.create(where / f"{first + count:08}{end}") as out:
                out.write(data)
            count += 1
    return count


def _folder_of(value: Any, names: Sequence[str]) -> str:
    """The folder of a class: its name, as far as a file system takes it; with its number where two would be one."""
    if not (isinstance(value, int) and 0 <= value < len(names)):
        return _safe(str(value))
    name = _safe(names[value])
    return f"{name}-{value}" if [_safe(other).casefold() for other in names].count(name.casefold()) > 1 else name


def _safe(name: str) -> str:
    return re.sub(r"[/\0\\]|^\.", "_", name.strip())[:100] or "_"
