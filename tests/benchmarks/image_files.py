"""Photos a second from JPEG files and from packs, beside torchvision's reference and DALI's pipeline for CPUs.

The reference is what torchvision's own training script does with Pillow: open, RandomResizedCrop to 224, mirror, to a
tensor, to floats, normalise, collate. The kit's arms are its whole loader (order, keys, collate) and `normalize`, from
the same files and from their pack of pixels, 256 on the shorter side. One process, one thread,
CPU time. Before a time is printed the arms must agree in the mean and the deviation of what they give to the model.

DALI decodes the random part alone, resizes it with antialiasing, as all others do, mirrors and normalises it. It needs
``pip install nvidia-dali-cuda130``, and no GPU.
"""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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

PHOTOS, BATCH, ROUNDS = 64, 32, 15
TORCHVISION = "torchvision's reference with Pillow"
DALI = "DALI's pipeline for CPUs"
GOALS = {TORCHVISION: (2, 4), DALI: (1, 1.5)}
"""Times as many photos as it, from JPEG files and from a pack."""

Arm = Callable[[int], Tensor]
"""Number of an epoch -> mean and deviation of each of its batches."""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms give other pixels.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        files = write_photos(root)
        pack_data("image_folder", root, 256, "raw", workers=1, say=lambda line: None)
        size = (root / "image_folder-256.pack/images.bin").stat().st_size / PHOTOS / 1e3
        peers: dict[str, Arm] = {TORCHVISION: reference(files)}
        if has_dali():
            peers[DALI] = dali(files)
        kits = {"JPEG files": kit(root, None), f"a pack of pixels, {size:.0f} kB a photo": kit(root, 256)}
        assert_alike({**peers, **kits})
        figures: list[Figure] = []
        for peer, arm in peers.items():
            measured = take_turns(timed({peer: arm, **kits}), rounds)
            figures += [row(measured, peer, *goal) for goal in zip(kits, GOALS[peer], strict=True)]
    if DALI not in peers:
        figures.append(Figure(f"the same to {DALI}", "", note="not measured: nvidia-dali not installed"))
    return figures


def timed(arms: dict[str, Arm]) -> dict[str, Callable[[], float]]:
    """CPU seconds of an epoch of each, and each time another epoch."""
    epochs = count()

    def turn(arm: Arm) -> float:
        return cpu_seconds(lambda: arm(next(epochs)))

    return {name: partial(turn, arm) for name, arm in arms.items()}


def row(measured: dict[str, list[float]], peer: str, source: str, at_least: float) -> Figure:
    """The line of one source, to one of the peers."""
    headline = ""
    if peer == TORCHVISION and source != "JPEG files":
        headline = f"photos a second and core from a pack, to {peer}"
    what = f"photos of 500x375 to 224 a second and core, from {source}, to {peer}"
    return against(
        measured, source, what=what, at_least=at_least, faster=True, tolerance=0.03, headline=headline, shown=a_second
    )


def a_second(seconds: float) -> str:
    """Photos a second of an epoch that took so many."""
    return f"{PHOTOS / seconds:,.0f}/s"


def write_photos(root: Path, count: int = PHOTOS) -> list[Path]:
    """Parts of two real photographs, as JPEG of several qualities, in folders of two classes and two splits."""
    from sklearn.datasets import load_sample_images

    random, files = numpy.random.default_rng(0), []
    photos = load_sample_images().images
    for number in range(count):
        top, left = random.integers(0, 427 - 375 + 1), random.integers(0, 640 - 500 + 1)
        part = photos[number % 2][top : top + 375, left : left + 500]
        file = root / "train" / ("temple", "flower")[number % 2] / f"{number:04}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(part).save(file, quality=(85, 90, 92, 95)[number % 4])
        files.append(file)
    for name in ("temple", "flower"):  # a split to validate on, so that all of train is trained on
        (root / "val" / name).mkdir(parents=True)
        (root / "val" / name / "0.jpg").write_bytes(files[0].read_bytes())
    return files


def reference(files: list[Path]) -> Arm:
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


def has_dali() -> bool:
    """Tell whether DALI is installed."""
    with suppress(ModuleNotFoundError):  # nothing of NVIDIA's is
        return importlib.util.find_spec("nvidia.dali") is not None
    return False


def dali(files: list[Path]) -> Arm:
    """A pipeline that does nothing ahead: what it costs is measured in its own turn."""
    library = importlib.import_module("nvidia.dali")  # without types: it is installed here and there
    fn = library.fn
    types = library.types
    sizes = {"batch_size": BATCH, "num_threads": 1, "device_id": None, "seed": 0}

    @library.pipeline_def(**sizes, exec_pipelined=False, exec_async=False, prefetch_queue_depth=1)
    def photos() -> Any:
        content, _ = fn.readers.file(files=[str(file) for file in files])
        shapes = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
        image = fn.decoders.image_random_crop(content, device="cpu", output_type=types.RGB, **shapes)
        image = fn.resize(image, size=[224, 224], interp_type=types.INTERP_LINEAR, antialias=True)
        mean, std = ([255 * level for level in levels] for levels in (PHOTO_MEAN, PHOTO_STD))
        mirror = fn.random.coin_flip()
        return fn.crop_mirror_normalize(
            image, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std, mirror=mirror
        )

    pipeline = photos()
    pipeline.build()

    def epoch(number: int) -> Tensor:
        batches = (pipeline.run()[0].as_tensor() for _ in range(PHOTOS // BATCH))
        return torch.stack([moments(torch.utils.dlpack.from_dlpack(batch)) for batch in batches])

    return epoch


def kit(root: Path, pack: int | None) -> Arm:
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


def assert_alike(arms: dict[str, Arm]) -> None:
    """Mean and deviation over some epochs differ by chance only, which is 0.025: each arm draws its own."""
    found = {name: torch.cat([arm(100 + number) for number in range(20)]).mean(0) for name, arm in arms.items()}
    first = next(iter(found.values()))
    worst = max(float((other - first).abs().max()) for other in found.values())
    assert worst <= 0.08, f"the arms do not give the same pixels: {found}"
