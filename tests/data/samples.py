"""Data sets for tests: by their settings, and folders of images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from trainkit.config.schema import DataConfig
from trainkit.data import build_data
from trainkit.data.base import Splits


def choice(name: str = "digits", root: Path | str = "nowhere", **options: Any) -> DataConfig:
    return DataConfig.model_validate({"name": name, "root": str(root), **options})


def build(name: str, root: Path | str = "nowhere", **options: Any) -> Splits:
    return build_data(choice(name, root, **options))


def write_images(
    folder: Path, counts: Mapping[str, int], *, suffix: str = "jpg", size: tuple[int, int] = (20, 16)
) -> None:
    """Write FOLDER/CLASS/NUMBER.SUFFIX, ``counts`` of each class, in a colour of its own."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            colour = (40 + 60 * label, 10 * number % 256, 128)
            Image.new("RGB", size, colour).save(folder / name / f"{number:03}.{suffix}")
