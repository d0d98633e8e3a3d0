"""Data sets: one file a data set in ``datasets/``, beside what they share.

A data set's file has ``build(root, *, <options>)``, which gives its `Splits`, and more functions where there is a use
for them: ``locate(root, ...)`` says without torch whether the data is there and the options make sense,
``train_size(root, ...)`` how many images there are to train on, or None where only reading them would tell;
``prepare(root, archives, say)`` downloads or unpacks what ``locate`` looks for.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit import plugins
from trainkit.data.folders import Files
from trainkit.data.pack import opened_pack, pack_folder, require_pack, shared_tree
from trainkit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainkit.data.base import Splits
    from trainkit.data.pack import Kind, Stage
    from trainkit.distributed.process_group import Distributed


_DATASETS = "trainkit.data.datasets"


class DataChoice(Protocol):
    """What this package needs of `trainkit.config.schema.DataConfig`."""

    @property
    def name(self) -> str: ...
    @property
    def root(self) -> str: ...
    @property
    def pack(self) -> int | None: ...
    @property
    def stage(self) -> Stage: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


def check_data(config: DataChoice) -> None:
    """Refuse, without importing torch, a data set that does not exist, wrong options, and data that is not there."""
    plugins.check_options(_DATASETS, config.name, config.options, where="data")
    if ":" in config.name:
        return  # importing the user's module may import torch: its own complaints come when the run starts
    module = importlib.import_module(f"{_DATASETS}.{config.name}")
    if config.pack is not None:
        _require_files(config.name, module)
        require_pack(pack_folder(Path(config.root), config.name, config.pack), config.name, config.pack)
    elif hasattr(module, "locate"):
        module.locate(Path(config.root), **plugins.fill(module.build, config.options, where="data"))


def train_size(config: DataChoice) -> int | None:
    """How many images there are to train on, where that is known at once and without torch; of data that is there."""
    if ":" in config.name or config.pack is not None:
        return None
    module = importlib.import_module(f"{_DATASETS}.{config.name}")
    if not hasattr(module, "train_size"):
        return None
    filled = plugins.fill(module.build, config.options, where="data")
    try:
        size: int | None = module.train_size(Path(config.root), **filled)
    except OSError:  # whoever reads the data says it better
        return None
    return size


def build_data(config: DataChoice, dist: Distributed | None = None) -> Splits:
    """The data set of a configuration. Raises UserError as `check_data` does.

    Args:
        dist: the ranks that build it together: one lists a million files for all of them, and what is wrong on one
            is raised on all.
    """
    plugins.check_options(_DATASETS, config.name, config.options, where="data")
    build = plugins.load(_DATASETS, config.name)
    filled = plugins.fill(build, config.options, where="data")
    root, module = Path(config.root), sys.modules[build.__module__]
    together: Callable[[Callable[[], Any]], Any] = _alone if dist is None else dist.together
    if config.pack is not None:
        _require_files(config.name, module)
        files: Files = opened_pack(root, config.name, config.pack, config.stage, dist)
    elif dist is None or ":" in config.name or not hasattr(module, "build_from"):
        return together(lambda: _require_splits(config.name, build(root, **filled)))  # type: ignore[no-any-return]
    else:
        together(lambda: module.locate(root, **filled))
        files = shared_tree(root, module.where, dist)
    splits: Splits = together(lambda: module.build_from(files, **filled))
    if config.pack is None:
        return splits
    from trainkit.data.pack import mapped

    return mapped(splits)


def _require_splits(name: str, built: object) -> object:
    from trainkit.data.base import Splits

    if isinstance(built, Splits):
        return built
    raise UserError(
        f"{name} returned no Splits.",
        why=f"It returned {type(built).__name__}; training asks for info, train, val, test and two transforms by name.",
        fix="Return trainkit.data.base.Splits(info=DataInfo(...), train=..., val=..., test=..., train_transform=..., "
        "eval_transform=...), and submit again.",
        key="data.name",
    )


def pack_data(name: str, root: Path, side: int, kind: Kind, *, workers: int, say: Callable[[str], None]) -> Path:
    """Pack a data set of image files that lies in ``root``; the folder of the pack, which is verified if it is there.

    Raises:
        UserError: it is none of image files, it is not there, or a file of it cannot be read.
    """
    from trainkit.data.pack import write_pack

    plugins.require(_DATASETS, name)
    module = importlib.import_module(f"{_DATASETS}.{name}")
    _require_files(name, module)
    module.locate(root, **plugins.fill(module.build, {}, where="data"))
    final = pack_folder(root, name, side)
    try:
        broken = write_pack(final, module.where(root), side, kind, workers=workers, say=say).verify()
    except OSError as error:
        kept = f" What is packed so far stays in {final}.partial: the same command goes on from there."
        raise _unwritable(name, root, error, kept) from None
    if broken:
        say(f"{len(broken)} images are broken, which data.max_broken={len(broken)} lets pass: {', '.join(broken[:5])}")
    return final


def _alone(make: Callable[[], Any]) -> Any:
    return make()


def _require_files(name: str, module: Any) -> None:
    if ":" in name or not hasattr(module, "build_from"):
        raise UserError(
            f"The data set '{name}' cannot be packed.",
            why="It is none of image files in folders.",
            fix="Leave data.pack and --pack out.",
            key="data.pack",
        )


def prepare_data(name: str, root: Path, archives: Sequence[Path], say: Callable[[str], None]) -> bool:
    """Download or unpack a data set of ours into ``root``; False where there is nothing to do so.

    Raises UserError for an unknown data set, for archives that are not there, and where ``root`` cannot be written.
    """
    plugins.require(_DATASETS, name)
    for archive in archives:
        if not archive.is_file():
            raise UserError(f"There is no file {archive}.", why="It was given to --archive.", fix="Correct its path.")
    module = importlib.import_module(f"{_DATASETS}.{name}")
    if not hasattr(module, "prepare"):  # a data set that somebody added, and brings by other means
        return False
    try:
        module.prepare(root, list(archives), say)
    except OSError as error:
        raise _unwritable(name, root, error) from None
    return True


def _unwritable(name: str, root: Path, error: OSError, more: str = "") -> UserError:
    return UserError(
        f"The data set '{name}' could not be written to {root}.",
        why=f"{error}.{more}",
        fix="Check its permissions, the disk's free space and your quota, or give another --root.",
    )
