"""Data sets: one file a data set, plus what they share (base, order, loader, transforms, files).

A data set's file has ``build(root, *, <options>)``, which gives its `Splits`, and two more functions where there is a
use for them: ``locate(root, ...)`` says without torch whether the data is there and the options make sense;
``prepare(root, archives, say)`` downloads or unpacks what ``locate`` looks for.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit import options, plugins
from trainkit.data.tree import Listing, Tree
from trainkit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainkit.data.base import Splits
    from trainkit.distributed.process_group import Distributed


class DataChoice(Protocol):
    """What this package needs of `trainkit.config.schema.DataConfig`."""

    @property
    def name(self) -> str: ...
    @property
    def root(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


def check_data(config: DataChoice) -> None:
    """Refuse, without importing torch, a data set that does not exist, wrong options, and data that is not there."""
    plugins.check_options(__name__, config.name, config.options, where="data")
    if ":" in config.name:
        return  # importing the user's module may import torch: its own complaints come when the run starts
    module = importlib.import_module(f"{__name__}.{config.name}")
    if hasattr(module, "locate"):
        module.locate(Path(config.root), **options.fill(module.build, config.options, where="data"))


def build_data(config: DataChoice, dist: Distributed | None = None) -> Splits:
    """The data set of a configuration. Raises UserError as `check_data` does.

    Args:
        dist: the ranks that build it together: one lists a million files for all of them, and what is wrong on one
            is raised on all.
    """
    plugins.check_options(__name__, config.name, config.options, where="data")
    build = plugins.load(__name__, config.name)
    filled = options.fill(build, config.options, where="data")
    root, module = Path(config.root), sys.modules[build.__module__]
    if dist is None:
        return build(root, **filled)  # type: ignore[no-any-return]
    if ":" in config.name or not hasattr(module, "build_from"):
        return dist.together(lambda: build(root, **filled))  # type: ignore[no-any-return]
    dist.together(lambda: module.locate(root, **filled))
    folder, splits = module.where(root)
    listing = Listing.from_bytes(dist.from_main(lambda: Listing.walk(folder, splits).to_bytes()))
    return dist.together(lambda: module.build_from(Tree(folder, listing), **filled))  # type: ignore[no-any-return]


def prepare_data(name: str, root: Path, archives: Sequence[Path], say: Callable[[str], None]) -> bool:
    """Download or unpack a data set of ours into ``root``; False where there is nothing to do so.

    Raises UserError for an unknown data set, for archives that are not there, and where ``root`` cannot be written.
    """
    plugins.require(__name__, name)
    for archive in archives:
        if not archive.is_file():
            raise UserError(f"There is no file {archive}.", why="It was given to --archive.", fix="Correct its path.")
    module = importlib.import_module(f"{__name__}.{name}")
    if not hasattr(module, "prepare"):  # a data set that somebody added, and brings by other means
        return False
    try:
        module.prepare(root, list(archives), say)
    except OSError as error:
        raise UserError(
            f"The data set '{name}' could not be written to {root}.",
            why=f"{error}.",
            fix="Check its permissions, the disk's free space and your quota, or give another --root.",
        ) from None
    return True
