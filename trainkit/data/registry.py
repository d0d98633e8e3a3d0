"""Data sets: one file a data set in ``datasets/``, which defines what `Dataset` says, beside what they share."""

from __future__ import annotations

import importlib
import inspect
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, Protocol, cast

from trainkit.cluster.ranks import RankEnv
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.config import plugin_options, plugins
from trainkit.config.schema import DataConfig
from trainkit.data import folders, image_kinds, losses
from trainkit.data.base import OneOfSeveral, require_options
from trainkit.data.decoding import shorter_sides
from trainkit.data.folders import Layout
from trainkit.data.image_files import Files
from trainkit.data.packs import Pack, opened_pack, pack_folder, require_exif, require_pack, write_pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainkit.data.base import Splits
    from trainkit.data.download import Say
    from trainkit.data.losses import Counts
    from trainkit.data.packs import PackFormat, Stage
    from trainkit.distributed.process_group import Distributed


_DATASETS = "trainkit.data.datasets"


class Dataset(Protocol):
    """Functions that the file of a data set defines: ``build``, and others where there is a use for them.

    ``SHAPE``, a literal, says what images are to be made up in its place (`data.fake`): ``num_classes``, ``train_size``
    and, where these are no options, ``image_size`` and ``in_chans``.

    The keyword-only parameters of ``build`` are the settings ``data.OPTION``. ``locate`` and ``train_size`` get their
    values as well. All but ``build`` run without torch.
    """

    def build(self, root: Path | Files, /, **options: Any) -> Splits:
        """Required: the data, ready to read, after ``locate``. With a ``layout`` it gets `Files` instead of a root."""

    def locate(self, root: Path, /, **options: Any) -> None:
        """Refuse options that make no sense, and data that is not there."""

    def look(self, root: Path, /, **options: Any) -> Sequence[str]:
        """Refuse, after ``locate``, what names or some files show to be wrong; say what is left out. It is quick, and
        runs before a run is queued and on rank 0. Without it the folders of a ``layout`` are looked at."""

    def train_size(self, root: Path, /, **options: Any) -> int | None:
        """Count the images to train on; None where only reading them would tell."""

    def some_images(self, root: Path, /, **options: Any) -> Sequence[Path]:
        """Some files to train on, the same ones each time: a new run that does not set ``image_size`` goes by them."""

    def shorter_sides(self, root: Path, /, **options: Any) -> list[int]:
        """The same of data whose files are not at hand: the shorter sides of some images."""

    def prepare(self, root: Path, archives: list[Path], say: Say, /, **options: Any) -> None:
        """Download or unpack what ``locate`` looks for; ``options`` where ``build`` has some without a default, and
        ``max_broken`` where it is asked for: so many samples may be lost."""

    def counts(self, root: Path, /, **options: Any) -> Counts:
        """Count what is read of each split after ``prepare``, and what is left out, with the reason."""

    def layout(self, root: Path, /, **options: Any) -> Layout:
        """Say where image files are. One rank lists them for all, and they can be packed. Training gives
        ``data.all_kinds`` as well."""


def _dataset(name: str) -> Dataset:
    """A data set of ours; what is optional in it may be missing."""
    plugins.require(_DATASETS, name)
    return cast(Dataset, importlib.import_module(f"{_DATASETS}.{name}"))


def _options(config: DataConfig) -> dict[str, Any]:
    """All options of the ``build`` of a data set of ours."""
    return plugin_options.fill(plugins.load(_DATASETS, config.name), config.options, where="data")


def _is_read(config: DataConfig) -> bool:
    """Return whether the data is one of ours, and not made up."""
    return not (":" in config.name or config.fake)


def _answer(config: DataConfig, function: str) -> Any:
    """Call the ``function`` of a data set of ours; None where it has none, and for made-up images and packs."""
    if not _is_read(config) or config.pack is not None or not hasattr(_dataset(config.name), function):
        return None
    return getattr(_dataset(config.name), function)(Path(config.root), **_options(config))


def _pack_folder(config: DataConfig, side: int) -> Path:
    return pack_folder(Path(config.root), config.name, side)


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
    require_options(_options(config))
    if config.pack is not None:
        require_pack(_pack_folder(config, config.pack), config.name, config.pack)
    _answer(config, "locate")


def look_at_data(config: DataConfig) -> Sequence[str]:
    """Refuse data that `check_data` has found, and a look at names or some files shows to be wrong; return sentences
    about what is left out of it. Needs no torch."""
    found: Sequence[str] | None = _answer(config, "look")
    if found is None and lists_files(config):
        found = folders.look_at_folders(_answer(config, "layout"))
    return () if found is None else found


def patience(config: DataConfig) -> float:
    """Seconds that training may wait for data that lies elsewhere; 0 where none does."""
    return float(_options(config).get("patience", 0.0)) if _is_read(config) else 0.0


def train_size(config: DataConfig) -> int | None:
    """Count the images to train on, where that is known at once and without torch."""
    if config.fake:
        return int(shape_of(config)["train_size"])
    with suppress(OSError):  # reading the data says it better
        size: int | None = _answer(config, "train_size")
        return size
    return None


def guessed(config: DataConfig) -> dict[str, tuple[Any, str]]:
    """Guess options that a new run's configuration does not set: option -> value and why. Needs no torch.

    A run keeps it in its configuration. One that goes on has it there, or is older and was trained at the default.

    Raises UserError for a damaged pack.
    """
    if not _is_read(config) or "image_size" in config.options:
        return {}
    sides = _answer(config, "shorter_sides")
    if sides is None:
        sides = shorter_sides(_answer(config, "some_images") or ())
    if config.pack is not None and hasattr(_dataset(config.name), "some_images"):
        sides = Pack(_pack_folder(config, config.pack)).shorter_sides()
    size = folders.usual_size(sides)
    if size is None:  # reading the data says what is wrong with it
        return {}
    middle = median_low(sides)
    words = f"{middle} pixels"
    if min(sides) != max(sides):
        words = f"{min(sides)} to {max(sides)} pixels, the median {middle}"
    if middle > folders.LARGEST_GUESS:
        words += f"; {folders.LARGEST_GUESS} at most"
    return {"image_size": (size, f"the shorter sides of {len(sides)} images are {words}")}


def lists_files(config: DataConfig) -> bool:
    """Return whether a start lists the image files in folders. A pack has its own list."""
    return _is_read(config) and config.pack is None and hasattr(_dataset(config.name), "layout")


def counts_of(config: DataConfig) -> Counts:
    """Count what is read of each split of data that is there, and what is not; empty where nobody knows it at once.

    Raises UserError for a damaged index or pack.
    """
    if _is_read(config) and config.pack is not None:
        return Pack(_pack_folder(config, config.pack)).counts()
    counts: Counts | None = _answer(config, "counts")
    if counts is None and lists_files(config):
        return folders.counts(_answer(config, "layout"))
    return counts or {}


def shape_of(config: DataConfig) -> dict[str, Any]:
    """Options of ``synthetic`` for images of the data's shape, by what its file states and what is set; needs no torch.

    Where neither says so: 10 classes, 100,000 images, 224 pixels, colours.

    Raises UserError for a data set of the user's own, of which nobody knows it.
    """
    if ":" in config.name:
        what = f"data.fake=true does not go with data.name={config.name}."
        fix = "Use data.name=synthetic with data.num_classes, data.image_size and data.train_size."
        raise UserError(
            what, why="Only the data set's own code knows the shape of its images.", fix=fix, key="data.fake"
        )
    options = _options(config)
    require_options(options)
    shape: dict[str, Any] = {"num_classes": 10, "train_size": 100_000, "image_size": 224, "in_chans": 3}
    shape |= {"val_size": 64, "test_size": 64} | plugins.stated(_DATASETS, config.name).get("SHAPE", {})
    for name in (*shape, "augment"):
        if options.get(name) is not None:
            shape[name] = options[name]
    return shape


def build_data(config: DataConfig, dist: Distributed | None = None) -> Splits:
    """The data set of a configuration. Raises UserError as `check_data` does.

    Args:
        dist: the ranks that build it together: one lists a million files for all of them, and what is wrong on one
            is raised on all. None: this process alone, which copies no pack to its node.
    """
    import torch

    from trainkit.data.base import Splits
    from trainkit.data.tensors import mapped
    from trainkit.distributed.process_group import Distributed

    staging = config.stage
    if dist is None:
        dist = Distributed(RankEnv.single(), torch.device("cpu"))
        staging = False
    dist.together(lambda: check_data(config))
    if config.fake:
        return _made_up(config, is_main=dist.is_main)
    if config.all_kinds or not lists_files(config):  # a run of before goes on with what it began with
        for sentence in dist.together(lambda: look_at_data(config) if dist.is_main else ()):
            terminal.warn(f"Note: {sentence}")
    build = plugins.load(_DATASETS, config.name)
    options = plugin_options.fill(build, config.options, where="data")
    source = _source(config, options, staging, dist)

    def built() -> Splits:
        made = build(source, **options)
        if not isinstance(made, Splits):
            why = f"It returned {type(made).__name__}; training asks for info, train, val, test and two transforms."
            fix = "Return trainkit.data.base.Splits(info=DataInfo(...), train=..., val=..., test=..., "
            fix += "train_transform=..., eval_transform=...), and submit again."
            raise UserError(f"{config.name} returned no Splits.", why=why, fix=fix, key="data.name")
        return mapped(made)

    return dist.together(built)


def _source(config: DataConfig, options: Mapping[str, Any], staging: Stage, dist: Distributed) -> Path | Files:
    """The first argument of a ``build``: the pack, the files that one rank lists, or the root."""
    exif = options.get("exif") is True
    root = Path(config.root)
    if config.pack is not None:
        pack = opened_pack(root, config.name, config.pack, staging, dist)
        require_exif(pack, config.name, config.pack, exif)
        return pack
    if not lists_files(config):
        return root
    folder, splits = _dataset(config.name).layout(root, **options, all_kinds=config.all_kinds)

    def listed() -> bytes:
        found = Files.walk(folder, splits, all_kinds=config.all_kinds)
        words = image_kinds.left_out_in_words(losses.summed(found.left_out.values()), folder)
        if words:
            terminal.say(f"Left out of {folder}: {words}.")
        return found.to_bytes()

    files = Files.from_bytes(folder, dist.from_main(listed))
    files.exif = exif
    return files


def _made_up(config: DataConfig, *, is_main: bool) -> Splits:
    """Images of the shape of the data, made up; says so."""
    shape = shape_of(config)
    made: Splits = plugins.load(_DATASETS, "synthetic")(Path(config.root), **shape)
    made = replace(made, info=replace(made.info, name=config.title))
    if is_main:
        words = f"{config.title}: {shape['num_classes']} classes, {shape['image_size']} pixels"
        terminal.warn(f"Note: {words}. Metrics on them mean nothing.")
    if plugins.stated(_DATASETS, config.name).get("LABELS") != "several":
        return made
    train, val, test = (OneOfSeveral(part, shape["num_classes"]) for part in (made.train, made.val, made.test))
    return replace(made, train=train, val=val, test=test)


def pack_data(
    name: str, root: Path, side: int, kind: PackFormat, *, workers: int, say: Say, exif: bool = False
) -> Path:
    """Pack a data set of image files that lies in ``root``; return the folder of the pack.

    Raises:
        UserError: it is not one of image files, it is not there, or a file of it cannot be read.
    """
    _require_layout(name)
    settings: dict[str, Any] = {"name": name, "root": str(root)}
    if exif:
        settings["exif"] = True
    config = DataConfig.model_validate(settings)
    check_data(config)
    for sentence in look_at_data(config):
        say(sentence)
    final = pack_folder(root, name, side)
    kept = f"The packed images stay in {final}.partial; the same command continues from there."
    with _written_to(root, name, kept):
        layout = _answer(config, "layout")
        broken = write_pack(final, layout, side, kind, workers=workers, say=say, exif=exif).verify()
    if broken:
        say(f"{len(broken)} images are broken; data.max_broken={len(broken)} skips them: {', '.join(broken[:5])}")
    return final


def _require_layout(name: str) -> None:
    if ":" in name or not hasattr(_dataset(name), "layout") or plugins.signature(_DATASETS, name).required:
        why = "Its images are not files of one folder."
        fix = "Omit data.pack and --pack; to pack its unpacked folder, use image_folder."
        raise UserError(f"The data set '{name}' cannot be packed.", why=why, fix=fix, key="data.pack")


def prepare_data(
    name: str, root: Path, archives: Sequence[Path], say: Say, options: Mapping[str, Any] | None = None
) -> bool:
    """Download or unpack a data set of ours into ``root``; False where it needs neither.

    Args:
        options: of a data set that stands for many, as in ``dataset``.

    Raises UserError for an unknown data set, for archives that are not there, and where ``root`` cannot be written.
    """
    prepare = getattr(_dataset(name), "prepare", None)  # one that somebody added may be brought by other means
    named = plugins.signature(_DATASETS, name).required
    options = dict(options or {})
    allowed: dict[str, Any] = {}
    if prepare is not None and "max_broken" in inspect.signature(prepare).parameters:
        allowed["max_broken"] = options.pop("max_broken", 0)
    if options and not named:
        what = f"{', '.join(f'data.{key}' for key in options)} has no effect on prepare."
        why = f"It always fetches the same files of '{name}'."
        raise UserError(what, why=why, fix="Give these when you train.")
    plugins.check_options(_DATASETS, name, options, where="data")
    for archive in archives:
        if not archive.is_file():
            raise UserError(f"There is no file {archive}.", why="--archive names it.", fix="Correct the path.")
    if prepare is None:
        return False
    with _written_to(root, name):
        given = plugin_options.fill(plugins.load(_DATASETS, name), options, where="data") if named else {}
        prepare(root, list(archives), say, **given, **allowed)
    return True


def _written_to(root: Path, name: str, more: str = "") -> AbstractContextManager[None]:
    fix = "Check its permissions, the disk's free space and your quota, or give another --root."
    return fileio.disk_errors_as(f"The data set '{name}' could not be written to {root}.", fix=fix, more=more)
