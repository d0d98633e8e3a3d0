"""One epoch of photos from a bucket by one library, as `streams` starts it: LIBRARY PHOTOS FOLDER.

All do the same work for the batches that they print the moments of: a random part of each photo to 224 pixels, mirror,
floats, normalised; batches of 64, two loader processes, nothing on this node's disk before.

Peers decode with torchvision and transform with its v2, which take less time than Pillow. What each needs of AWS is in
the environment.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

BATCH, WORKERS, SHARD = 64, 2, 128
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def transform():
    """As in the examples of all three, for tensors."""
    from torchvision.transforms import v2

    part = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose([*part, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def decoded(data: bytes) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)


class Prepared:
    """A photo's bytes and its number -> what the model gets."""

    def __init__(self) -> None:
        self.transform = transform()

    def __call__(self, sample):
        return self.transform(decoded(sample[0])), int(sample[1])


def trainkit(photos: int, folder: Path) -> Batches:
    from trainkit.config.schema import DataConfig
    from trainkit.data.base import normalize
    from trainkit.data.loader import Loading, train_batches
    from trainkit.data.registry import build_data

    data = build_data(DataConfig(name="stream", root=str(folder), url="s3://photos/tars", image_size=224))
    sizes = {"global_batch_size": BATCH, "micro_batch_size": BATCH}
    with train_batches(data, Loading(workers=WORKERS), seed=0, steps=range(photos // BATCH), **sizes) as batches:
        for batch in batches:
            yield normalize(batch.images, data.info), batch.labels


def webdataset(photos: int, folder: Path) -> Batches:
    """From the bucket by HTTP, which it reads with curl: faster than `aws s3 cp`, a Python process for each shard."""
    import webdataset as library

    last = photos // SHARD - 1
    url = f"{os.environ['AWS_ENDPOINT_URL']}/photos/tars/train-{{000000..{last:06}}}.tar"
    samples = library.WebDataset(url, shardshuffle=100).shuffle(1000).to_tuple("jpg", "cls").map(Prepared())
    yield from library.WebLoader(samples.batched(BATCH), batch_size=None, num_workers=WORKERS)


def litdata(photos: int, folder: Path) -> Batches:
    import litdata as library

    # It reads from S3 by HTTPS alone; a server on loopback has no certificate.
    library.streaming.downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    source = library.streaming.resolver.Dir(path=str(folder / "litdata"), url="s3://photos/litdata")
    samples = library.StreamingDataset(source, shuffle=True, transform=Prepared())
    yield from library.StreamingDataLoader(samples, batch_size=BATCH, num_workers=WORKERS)


def mosaic(photos: int, folder: Path) -> Batches:
    from streaming import StreamingDataset

    class Photos(StreamingDataset):
        prepared = Prepared()

        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return self.prepared((sample["photo"], sample["number"]))

    samples = Photos(remote="s3://photos/mosaic", local=str(folder / "mosaic"), shuffle=True, batch_size=BATCH)
    yield from torch.utils.data.DataLoader(samples, batch_size=BATCH, num_workers=WORKERS)


def write(photos: int, root: Path) -> None:
    """The photos of a folder in the formats of litdata and of mosaicml-streaming, as many in a shard as in a tar."""
    from litdata import optimize
    from streaming import MDSWriter

    files = sorted((root / "photos").glob("train/*/*.jpg"), key=lambda file: file.name)
    size = sum(file.stat().st_size for file in files) * SHARD // photos
    columns = {"photo": "bytes", "number": "int"}
    with MDSWriter(out=str(root / "bucket/mosaic"), columns=columns, size_limit=size) as out:
        for number, file in enumerate(files):
            out.write({"photo": file.read_bytes(), "number": number})
    optimize(numbered, list(enumerate(files)), str(root / "bucket/litdata"), chunk_size=SHARD, num_workers=1)


def numbered(item):
    return item[1].read_bytes(), item[0]


NEEDS = {
    "trainkit": ("s3fs", "trainkit.config.schema", "trainkit.data.loader", "trainkit.data.datasets.stream"),
    "webdataset": ("webdataset", "torchvision.transforms.v2"),
    "litdata": ("litdata", "boto3", "obstore", "torchvision.transforms.v2"),
    "mosaic": ("streaming", "boto3", "torchvision.transforms.v2"),
}
"""Imported before the clock runs."""


def spent() -> float:
    """CPU seconds of this process and of those that have ended."""
    parts = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def main(name: str, photos: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if name == "write":
        write(photos, folder)
        return
    for module in NEEDS[name]:
        importlib.import_module(module)
    numbers, moments = [], []
    began, cpu = time.perf_counter(), spent()
    batches = globals()[name](photos, folder)
    for images, labels in batches:
        some = images[:, :, ::16, ::16]
        moments.append([float(some.mean()), float(some.std())])
        numbers += labels.tolist()
    seconds = time.perf_counter() - began
    del batches
    found = {"seconds": seconds, "cpu": spent() - cpu, "numbers": numbers}
    print(json.dumps({**found, "moments": torch.tensor(moments).mean(0).tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
