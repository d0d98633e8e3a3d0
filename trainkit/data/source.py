"""Where the image files of a data set come from: its folders, its pack, or this node's copy of that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainkit.data.pack import Pack, pack_folder, require_pack
from trainkit.data.staging import scratch, stage, staged
from trainkit.data.tree import Files, Listing, Place, Tree
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.distributed.process_group import Distributed

Stage = bool | Literal["auto"]


def shared_tree(root: Path, where: Callable[[Path], Place], dist: Distributed) -> Tree:
    """The files below ``root``, which rank 0 alone looks for."""
    folder, splits = where(root)
    return Tree(folder, Listing.from_bytes(dist.from_main(lambda: Listing.walk(folder, splits).to_bytes())))


def opened_pack(root: Path, name: str, side: int, staging: Stage, dist: Distributed | None) -> Files:
    """The pack of a data set; its copy on this node's disk if ``staging`` says so. One rank of a node copies.

    Raises:
        UserError: on all ranks, where it is missing or damaged on one, and where it must be copied and cannot be.
    """
    folder = pack_folder(root, name, side)
    if dist is None:
        require_pack(folder, name, side)
        return Pack(folder)
    dist.together(lambda: require_pack(folder, name, side))
    if staging is False:
        return dist.together(lambda: Pack(folder))
    disk = scratch()
    one_of_node = dist.env.local_rank == 0
    dist.together(lambda: _staged(folder, disk, must=staging is True) if one_of_node else None)

    def opened() -> Pack:
        return (None if disk is None else staged(folder, disk)) or Pack(folder)

    return dist.together(opened)


def _staged(pack: Path, disk: Path | None, *, must: bool) -> None:
    why_not = "neither SLURM_TMPDIR nor TMPDIR names a folder here" if disk is None else stage(pack, disk)
    if not why_not:
        print(f"The pack is read from this node's {disk}.", flush=True)
    elif must:
        raise UserError(
            f"The pack {pack} cannot be copied to this node.",
            why=f"{why_not[0].upper()}{why_not[1:]}.",
            fix="Set data.stage=auto: then it is read where it lies.",
            key="data.stage",
        )
    else:
        print(f"Note: the pack is read where it lies: {why_not}.", flush=True)
