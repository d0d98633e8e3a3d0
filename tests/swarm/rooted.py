"""The digits, as a data set that must lie on a machine: only who has its folder, as its own data.root, has any."""

from pathlib import Path

from trainkit.data.base import Splits, missing
from trainkit.data.datasets.digits import build


def data(root: Path) -> Splits:
    """They are there if the folder is."""
    if not root.is_dir():
        raise missing("rooted", root, root, fix="Get it.")
    return build(root)
