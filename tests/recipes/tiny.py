"""The data sets of the recipes with a few images each, in the very files that a student has: what is fetched."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy
from PIL import Image

from trainkit.data.datasets import cifar10, cinic10, fashion_mnist, imagenet

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
WNIDS = ("n01440764", "n01443537", "n01484850", "n01491361")


def archives(folder: Path) -> dict[str, list[Path]]:
    """Writes all of them into ``folder``; data set -> its archives."""
    folder.mkdir(parents=True)
    return {
        "cifar10": [write_cifar10(folder)],
        "cinic10": [write_cinic10(folder)],
        "fashion_mnist": write_fashion_mnist(folder),
        "imagenet": write_imagenet(folder),
    }


def write_cifar10(folder: Path, per_file: int = 20) -> Path:
    """cifar-10-python.tar.gz: five batches and a test batch, in pickle's protocol 2; images of a class look alike."""
    path = folder / cifar10.ARCHIVE
    random = numpy.random.default_rng(0)
    labels = [index % 10 for index in range(per_file)]
    with tarfile.open(path, "w:gz") as tar:
        for file in (*cifar10.TRAIN_FILES, *cifar10.TEST_FILES):
            pixels = random.integers(0, 100, (per_file, 3072)) + 15 * numpy.array(labels)[:, None]
            batch = {
                "batch_label": file,
                "labels": labels,
                "data": pixels.astype(numpy.uint8),
                "filenames": [f"{index}.png" for index in range(per_file)],
            }
            _add(tar, f"{cifar10.FOLDER}/{file}", pickle.dumps(batch, protocol=2))
        meta = {"num_cases_per_batch": per_file, "label_names": NAMES, "num_vis": 3072}
        _add(tar, f"{cifar10.FOLDER}/batches.meta", pickle.dumps(meta, protocol=2))
        _add(tar, f"{cifar10.FOLDER}/readme.html", b"<meta>")
    return path


def write_cinic10(folder: Path, per_class: int = 8) -> Path:
    """CINIC-10.tar.gz: {train,valid,test}/CLASS/NAME.png, of both sources' names."""
    path = folder / cinic10.ARCHIVE
    with tarfile.open(path, "w:gz") as tar:
        _add(tar, "./README.md", b"CINIC-10")
        for split in cinic10.SPLITS:
            for label, name in enumerate(NAMES):
                for number in range(per_class):
                    source = f"cifar10-{split}-{number}" if number % 2 else f"n0144{label:04}_{number}"
                    _add(tar, f"./{split}/{name}/{source}.png", _picture("PNG", (32, 32), label, number))
    return path


def write_fashion_mnist(folder: Path, count: int = 80) -> list[Path]:
    """The four files in IDX, packed each by itself."""
    random = numpy.random.default_rng(0)
    paths = []
    for name in fashion_mnist.MD5S:
        labels = (numpy.arange(count) % 10).astype(numpy.uint8)
        if "images" in name:
            images = random.integers(0, 100, (count, 28, 28)) + 15 * labels[:, None, None]
            content = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + images.astype(numpy.uint8).tobytes()
        else:
            content = struct.pack(">HBBI", 0, 8, 1, count) + labels.tobytes()
        paths.append(folder / name)
        paths[-1].write_bytes(gzip.compress(content, mtime=0))
    return paths


def write_imagenet(folder: Path, per_class: int = 12) -> list[Path]:
    """The three archives of ILSVRC 2012: one of archives, one of images, and the kit that knows their classes."""
    from scipy.io import savemat  # type: ignore[import-untyped]

    paths = [folder / name for name in (imagenet.TRAIN, imagenet.VAL, imagenet.DEVKIT)]
    with tarfile.open(paths[0], "w") as outer:
        for label, wnid in enumerate(WNIDS):
            inner_bytes = io.BytesIO()
            with tarfile.open(fileobj=inner_bytes, mode="w") as inner:
                for number in range(per_class):
                    _add(inner, f"{wnid}_{number}.JPEG", _picture("JPEG", (80, 60), label, number))
            _add(outer, f"{wnid}.tar", inner_bytes.getvalue())
    with tarfile.open(paths[1], "w") as tar:
        for number in range(1, 9):
            picture = _picture("JPEG", (80, 60), (number - 1) % len(WNIDS), number)
            _add(tar, f"ILSVRC2012_val_{number:08}.JPEG", picture)
    fields = [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")]
    rows = [(number, wnid, "fish, animal", "swims", 0) for number, wnid in enumerate(WNIDS, start=1)]
    synsets = numpy.array([*rows, (99, "n00001740", "entity", "all", 3)], dtype=fields)
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets.reshape(-1, 1)})
    truth = "".join(f"{number % len(WNIDS) + 1}\n" for number in range(8)).encode()
    with tarfile.open(paths[2], "w:gz") as tar:
        _add(tar, "ILSVRC2012_devkit_t12/data/meta.mat", meta.getvalue())
        _add(tar, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", truth)
    return paths


def write_vit_weights(folder: Path, name: str) -> Path:
    """model.safetensors as the Hub has it of a ViT of timm's: for 1,000 classes."""
    import timm
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(timm.create_model(name, num_classes=1000).state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def _picture(kind: str, size: tuple[int, int], label: int, number: int) -> bytes:
    out = io.BytesIO()
    random = numpy.random.default_rng((label, number))
    pixels = random.integers(0, 100, (size[1], size[0], 3)) + 15 * label
    Image.fromarray(pixels.astype(numpy.uint8)).save(out, kind)
    return out.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
