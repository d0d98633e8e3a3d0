"""Photos a second from JPEG files and from packs, beside torchvision's
reference.

The reference is what torchvision's own training script does with Pillow: open, RandomResizedCrop to 224, mirror, to a
tensor, to floats, normalise, collate. The kit's arms are its whole loader (order, keys, collate) and `normalize`, from
the same files and from their pack of pixels, 256 on the shorter side. One process, one thread,
CPU time. Before a time is printed the arms must agree in the mean and the deviation of what they give to the model.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision import transforms

from tests.benchmarks.measuring import Figure, against, cpu_seconds, loaded, take_turns
from trainkit.config.schema import DataConfig
from trainkit.data.base import normalize
from trainkit.data.photo_transforms import PHOTO_MEAN, PHOTO_STD
from trainkit.data.registry import build_data, pack_data

PHOTOS, BATCH, ROUNDS = 64, 32, 9


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms give other pixels.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        files = write_photos(root)
        pack_data("image_folder", root, 256, "raw", workers=1, say=lambda line: None)
        arms: dict[str, Callable[[int], Tensor]] = {
            "torchvision, Pillow": reference(files),
            "JPEG files": kit(root, None),
            "pack of pixels": kit(root, 256),
        }
        assert_alike(arms)
        epochs = count()
        timed = {name: lambda arm=arm: cpu_seconds(lambda: arm(next(epochs))) for name, arm in arms.items()}
        measured = take_turns(timed, rounds)
        size = (root / "image_folder-256.pack/images.bin").stat().st_size
    headline = "photos a second and core from a pack, to torchvision's reference with Pillow"

    def row(arm: str, source: str, **more: Any) -> Figure:
        what = f"photos of 500x375 to 224 a second and core, from {source}, to torchvision's reference with Pillow"
        shown = lambda seconds: f"{PHOTOS / seconds:,.0f}/s"  # noqa: E731
        return against(measured, arm, what=what, faster=True, tolerance=0.03, shown=shown, **more)

    return [
        row("JPEG files", "JPEG files", at_least=2),
        row("pack of pixels", f"a pack of pixels, {size / PHOTOS / 1e3:.0f} kB a photo", at_least=4, headline=headline),
    ]


def write_photos(root: Path) -> list[Path]:
    """Parts of two real photographs, as JPEG of several qualities, in folders of two classes and two splits."""
    from sklearn.datasets import load_sample_images

    random, files = numpy.random.default_rng(0), []
    photos = load_sample_images().images
    for number in range(PHOTOS):
        top, left = random.integers(0, 427 - 375 + 1), random.integers(0, 640 - 500 + 1)
        part = photos[number % 2][top : top + 375, left : left + 500]
        file = root / "train" / ("temple", "flower")[number % 2] / f"{number:03}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(part).save(file, quality=(85, 90, 92, 95)[number % 4])
        files.append(file)
    for name in ("temple", "flower"):  # a split to validate on, so that all of train is trained on
        (root / "val" / name).mkdir(parents=True)
        (root / "val" / name / "0.jpg").write_bytes(files[0].read_bytes())
    return files


def reference(files: list[Path]) -> Callable[[int], Tensor]:
    """As references/classification of torchvision, without its data loader's processes."""
    augment = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    floats = [transforms.ConvertImageDtype(torch.float), transforms.Normalize(PHOTO_MEAN, PHOTO_STD)]
    transform = transforms.Compose([*augment, *floats])

    def read(file: Path) -> Tensor:
        with file.open("rb") as opened:
            return transform(Image.open(opened).convert("RGB"))  # type: ignore[no-any-return]

    def epoch(number: int) -> Tensor:
        torch.manual_seed(number)
        starts = range(0, len(files), BATCH)
        return torch.stack([moments(default_collate([read(f) for f in files[at : at + BATCH]])) for at in starts])

    return epoch


def kit(root: Path, pack: int | None) -> Callable[[int], Tensor]:
    """The kit's loader, in this process."""
    data = build_data(DataConfig(name="image_folder", root=str(root), pack=pack))
    steps = PHOTOS // BATCH

    def epoch(number: int) -> Tensor:
        with loaded(data, number * steps, (number + 1) * steps, BATCH) as batches:
            return torch.stack([moments(normalize(batch.images, data.info)) for batch in batches])

    return epoch


def moments(images: Tensor) -> Tensor:
    """Mean and deviation of a batch, of a few of its pixels: so that measuring them costs nothing."""
    some = images[:, :, ::16, ::16]
    return torch.stack([some.mean(), some.std()])


def assert_alike(arms: dict[str, Callable[[int], Tensor]]) -> None:
    """Mean and deviation over some epochs differ by chance only, which is 0.025: each arm draws its own."""
    found = {name: torch.cat([arm(100 + number) for number in range(20)]).mean(0) for name, arm in arms.items()}
    first = next(iter(found.values()))
    worst = max(float((other - first).abs().max()) for other in found.values())
    assert worst <= 0.08, f"the arms do not give the same pixels: {found}"
