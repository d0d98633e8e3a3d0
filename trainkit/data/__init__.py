"""Data sets: one file a data set in ``datasets/``, which defines what `Dataset` says, beside what they share."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, Protocol, cast

from trainkit import fileio, plugins
from trainkit.data.base import OneOfSeveral, require_options
from trainkit.data.folders import LARGEST_GUESS, Files, Layout, shorter_sides, usual_size
from trainkit.data.packs import Pack, opened_pack, pack_folder, require_exif, require_pack, write_pack
from trainkit.errors import UserError
from trainkit.ranks import RankEnv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainkit.config.schema import DataConfig
    from trainkit.data.base import Splits
    from trainkit.data.download import Say
    from trainkit.data.packs import Kind
    from trainkit.distributed.process_group import Distributed

_DATASETS = "trainkit.data.datasets"


class Dataset(Protocol):
    """What the file of a data set defines: ``build``, and more functions where there is a use for them.

    ``SHAPE``, a literal, says what images are to be made up in its place (`data.fake`): ``num_classes``, ``train_size``
    and, where these are no options, ``image_size`` and ``in_chans``.

    The keyword-only parameters of ``build`` are the settings ``data.OPTION``. ``locate`` and ``train_size`` get their
    values as well. All but ``build`` run without torch.
    """

    def build(self, root: Path | Files, /, **options: Any) -> Splits:
        """Required: the data, ready to read, after ``locate``. With a ``layout`` it gets `Files` instead of a root."""

    def locate(self, root: Path, /, **options: Any) -> None:
        """Refuse options that make no sense, and data that is not there."""

    def train_size(self, root: Path, /, **options: Any) -> int | None:
        """How many images there are to train on; None where only reading them would tell."""

    def some_images(self, root: Path, /, **options: Any) -> Sequence[Path]:
        """Some files to train on, the same ones each time: a new run that does not set ``image_size`` goes by them."""

    def shorter_sides(self, root: Path, /, **options: Any) -> list[int]:
        """The same of data whose files are not at hand: the shorter sides of some images."""

    def prepare(self, root: Path, archives: list[Path], say: Say, /, **options: Any) -> None:
        """Download or unpack what ``locate`` looks for; ``options`` where ``build`` has some without a default."""

    def layout(self, root: Path, /, **options: Any) -> Layout:
        """Of image files: where they are. One rank lists them for all, and they can be packed."""


def _dataset(name: str) -> Dataset:
    """A data set of ours; what is optional in it may be missing."""
    plugins.require(_DATASETS, name)
    return cast(Dataset, importlib.import_module(f"{_DATASETS}.{name}"))


def _with_options(config: DataConfig) -> tuple[Dataset, dict[str, Any]]:
    """A data set of ours, and all options of its ``build``."""
    dataset = _dataset(config.name)
    return dataset, plugins.fill(dataset.build, config.options, where="data")


def check_data(config: DataConfig) -> None:
    """Refuse, without importing torch, a data set that does not exist, wrong options, and data that is not there."""
    plugins.check_options(_DATASETS, config.name, config.options, where="data")
    if config.fake:
        shape_of(config)
        return
    if config.pack is not None:
        _require_layout(config.name)
    if ":" in config.name:
        return  # importing the user's module may import torch: its own complaints come when the run starts
    dataset, options = _with_options(config)
    root = Path(config.root)
    require_options(options)
    if config.pack is not None:
        require_pack(pack_folder(root, config.name, config.pack), config.name, config.pack)
    elif hasattr(dataset, "locate"):
        dataset.locate(root, **options)


def patience(config: DataConfig) -> float:
    """Seconds that training may wait for data that lies elsewhere; 0 where none does."""
    if ":" in config.name or config.fake:
        return 0.0
    return float(_with_options(config)[1].get("patience", 0.0))


def train_size(config: DataConfig) -> int | None:
    """How many images there are to train on, where that is known at once and without torch."""
    if config.fake:
        return int(shape_of(config)["train_size"])
    if ":" in config.name or config.pack is not None:
        return None
    dataset, options = _with_options(config)
    with suppress(OSError):  # reading the data says it better
        return dataset.train_size(Path(config.root), **options) if hasattr(dataset, "train_size") else None
    return None


def guessed(config: DataConfig) -> dict[str, tuple[Any, str]]:
    """What a new run sets that its configuration does not: option -> value and why. Needs no torch.

    A run keeps it in its configuration. One that goes on has it there, or is older and was trained at the default.

    Raises UserError for a damaged pack.
    """
    if ":" in config.name or config.fake or "image_size" in config.options:
        return {}
    dataset, options = _with_options(config)
    root, measured = Path(config.root), getattr(dataset, "shorter_sides", None)
    if not measured and not hasattr(dataset, "some_images"):
        return {}
    if config.pack is not None:
        sides = Pack(pack_folder(root, config.name, config.pack)).shorter_sides()
    else:
        sides = measured(root, **options) if measured else shorter_sides(dataset.some_images(root, **options))
    if (size := usual_size(sides)) is None:  # reading the data says what is wrong with it
        return {}
    least, middle, most = min(sides), median_low(sides), max(sides)
    words = f"{least} pixels" if least == most else f"{least} to {most} pixels, the median {middle}"
    at_most = f"; {LARGEST_GUESS} at most" if middle > LARGEST_GUESS else ""
    return {"image_size": (size, f"the shorter sides of {len(sides)} images are {words}{at_most}")}


def shape_of(config: DataConfig) -> dict[str, Any]:
    """Options of ``synthetic`` for images of the data's shape, by what its file states and what is set; needs no torch.

    Where neither says so: 10 classes, 100,000 images, 224 pixels, colours.

    Raises UserError for a data set of the user's own, of which nobody knows it.
    """
    if ":" in config.name:
        fix = "Use data.name=synthetic, with data.num_classes, data.image_size and data.train_size."
        raise UserError(
            f"data.fake=true does not go with data.name={config.name}.",
            why="Only its own code knows the shape of its images.", fix=fix, key="data.fake",
        )  # fmt: skip
    _, options = _with_options(config)
    require_options(options)
    shape = {"num_classes": 10, "train_size": 100_000, "image_size": 224, "in_chans": 3, "val_size": 64}
    shape |= {"test_size": 64, **plugins.stated(_DATASETS, config.name).get("SHAPE", {})}
    return {**shape, **{name: options[name] for name in (*shape, "augment") if options.get(name) is not None}}


def build_data(config: DataConfig, dist: Distributed | None = None) -> Splits:
    """The data set of a configuration. Raises UserError as `check_data` does.

    Args:
        dist: the ranks that build it together: one lists a million files for all of them, and what is wrong on one
            is raised on all. None: this process alone, which copies no pack to its node.
    """
    import torch

    from trainkit.data.base import Splits
    from trainkit.data.loader import mapped
    from trainkit.distributed.process_group import Distributed

    staging = config.stage if dist is not None else False
    dist = dist or Distributed(RankEnv.single(), torch.device("cpu"))
    dist.together(lambda: check_data(config))
    if config.fake:
        return _made_up(config, is_main=dist.is_main)
    build, root = plugins.load(_DATASETS, config.name), Path(config.root)
    options = plugins.fill(build, config.options, where="data")
    source: Path | Files = root
    exif = options.get("exif") is True
    if config.pack is not None:
        source = opened_pack(root, config.name, config.pack, staging, dist)
        require_exif(source, config.name, config.pack, exif)
    elif ":" not in config.name and hasattr(dataset := _dataset(config.name), "layout"):
        folder, splits = dataset.layout(root, **options)
        source = Files.from_bytes(folder, dist.from_main(lambda: Files.walk(folder, splits).to_bytes()))
        source.exif = exif

    def built() -> Splits:
        if not isinstance(made := build(source, **options), Splits):
            raise UserError(
                f"{config.name} returned no Splits.",
                why=f"It returned {type(made).__name__}; training asks for info, train, val, test and two transforms.",
                fix="Return trainkit.data.base.Splits(info=DataInfo(...), train=..., val=..., test=..., "
                "train_transform=..., eval_transform=...), and submit again.",
                key="data.name",
            )
        return mapped(made)

    return dist.together(built)


def _made_up(config: DataConfig, *, is_main: bool) -> Splits:
    """Images of the shape of the data, made up; says so."""
    shape = shape_of(config)
    made: Splits = plugins.load(_DATASETS, "synthetic")(Path(config.root), **shape)
    made = replace(made, info=replace(made.info, name=config.title))
    if is_main:
        words = f"{config.title}: {shape['num_classes']} classes, {shape['image_size']} pixels"
        print(f"Note: {words}. Nothing that is measured on them counts.", file=sys.stderr, flush=True)
    if plugins.stated(_DATASETS, config.name).get("LABELS") != "several":
        return made
    train, val, test = (OneOfSeveral(part, shape["num_classes"]) for part in (made.train, made.val, made.test))
    return replace(made, train=train, val=val, test=test)


def pack_data(name: str, root: Path, side: int, kind: Kind, *, workers: int, say: Say, exif: bool = False) -> Path:
    """Pack a data set of image files that lies in ``root``; return the folder of the pack.

    Raises:
        UserError: it is not one of image files, it is not there, or a file of it cannot be read.
    """
    dataset = _dataset(name)
    _require_layout(name)
    plugins.check_options(_DATASETS, name, {"exif": True} if exif else {}, where="data")
    dataset.locate(root, **plugins.fill(dataset.build, {}, where="data"))
    final = pack_folder(root, name, side)
    kept = f"What is packed so far stays in {final}.partial: the same command goes on from there."
    with _written_to(root, name, kept):
        broken = write_pack(final, dataset.layout(root), side, kind, workers=workers, say=say, exif=exif).verify()
    if broken:
        say(f"{len(broken)} images are broken, which data.max_broken={len(broken)} lets pass: {', '.join(broken[:5])}")
    return final


def _require_layout(name: str) -> None:
    if ":" in name or not hasattr(_dataset(name), "layout") or plugins.signature(_DATASETS, name).required:
        why = "It is not one folder of image files."
        fix = "Leave data.pack and --pack out; what was unpacked for it is packed as image_folder, by its folder."
        raise UserError(f"The data set '{name}' cannot be packed.", why=why, fix=fix, key="data.pack")


def prepare_data(
    name: str, root: Path, archives: Sequence[Path], say: Say, options: Mapping[str, Any] | None = None
) -> bool:
    """Download or unpack a data set of ours into ``root``; False where it needs neither.

    Args:
        options: of a data set that stands for many, as in ``dataset``.

    Raises UserError for an unknown data set, for archives that are not there, and where ``root`` cannot be written.
    """
    dataset, named, options = _dataset(name), plugins.signature(_DATASETS, name).required, dict(options or {})
    if options and not named:
        why, fix = f"What is fetched of '{name}' is always the same.", "Give these when you train."
        raise UserError(f"{', '.join(f'data.{key}' for key in options)} is not for preparing.", why=why, fix=fix)
    plugins.check_options(_DATASETS, name, options, where="data")
    for archive in archives:
        if not archive.is_file():
            raise UserError(f"There is no file {archive}.", why="It was given to --archive.", fix="Correct its path.")
    if not hasattr(dataset, "prepare"):  # a data set that somebody added, and brings by other means
        return False
    with _written_to(root, name):
        given = plugins.fill(dataset.build, options, where="data") if named else {}
        dataset.prepare(root, list(archives), say, **given)
    return True


def _written_to(root: Path, name: str, more: str = "") -> AbstractContextManager[None]:
    fix = "Check its permissions, the disk's free space and your quota, or give another --root."
    return fileio.disk_errors_as(f"The data set '{name}' could not be written to {root}.", fix=fix, more=more)
