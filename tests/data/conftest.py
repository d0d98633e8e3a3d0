"""Tiny data sets, in the files of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.recipes import tiny
from trainkit.data import prepare_data


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tests run side by side: more threads than one would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the data sets that come in archives, a few images each, unpacked by the code for the real ones."""
    root = tmp_path_factory.mktemp("prepared")
    for name, archives in tiny.archives(root / "archives").items():
        assert prepare_data(name, root, archives, lambda line: None)
    return root


@pytest.fixture
def write_images() -> Callable[..., None]:
    """Writes FOLDER/CLASS/NUMBER.SUFFIX, ``counts`` of each class, in a colour of its own."""

    def write(
        folder: Path, counts: Mapping[str, int], *, suffix: str = "jpg", size: tuple[int, int] = (20, 16)
    ) -> None:
        for label, (name, count) in enumerate(counts.items()):
            (folder / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                colour = (40 + 60 * label, 10 * number % 256, 128)
                Image.new("RGB", size, colour).save(folder / name / f"{number:03}.{suffix}")

    return write
