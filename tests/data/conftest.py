"""Tiny data sets in the formats of the real ones."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from tests.data import cifar10_files


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tests run side by side: more threads than one would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def write_cifar10() -> Callable[[Path, int], None]:
    """Writes ROOT/cifar-10-batches-py as the official archive has it, in pickle's protocol 2."""

    return cifar10_files.write_cifar10


@pytest.fixture
def write_fashion_mnist() -> Callable[[Path, int], None]:
    """Writes ROOT/FashionMNIST/raw: big-endian headers, then bytes."""

    def write(root: Path, count: int = 40) -> None:
        folder = root / "FashionMNIST" / "raw"
        folder.mkdir(parents=True)
        random = numpy.random.default_rng(0)
        for split in ("train", "t10k"):
            images = random.integers(0, 256, (count, 28, 28), dtype=numpy.uint8)
            labels = (numpy.arange(count) % 10).astype(numpy.uint8)
            header = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28)
            (folder / f"{split}-images-idx3-ubyte").write_bytes(header + images.tobytes())
            (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, count) + labels.tobytes())

    return write


@pytest.fixture
def write_images() -> Callable[..., None]:
    """Writes FOLDER/CLASS/NUMBER.SUFFIX, so many for each class, of one colour for each class."""

    def write(
        folder: Path, counts: Mapping[str, int], *, suffix: str = "jpg", size: tuple[int, int] = (20, 16)
    ) -> None:
        for label, (name, count) in enumerate(counts.items()):
            (folder / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                colour = (40 + 60 * label, 10 * number % 256, 128)
                Image.new("RGB", size, colour).save(folder / name / f"{number:03}.{suffix}")

    return write
