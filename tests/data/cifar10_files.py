"""Made-up CIFAR-10, in the files of the official archive."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_cifar10(root: Path, per_file: int = 20) -> None:
    """ROOT/cifar-10-batches-py with noise, in pickle's protocol 2; ``per_file`` images in each of its six files."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = numpy.random.default_rng(0)
    for file in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        batch = {
            "batch_label": file,
            "labels": [index % 10 for index in range(per_file)],
            "data": random.integers(0, 256, (per_file, 3072), dtype=numpy.uint8),
            "filenames": [f"{index}.png" for index in range(per_file)],
        }
        (folder / file).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {"num_cases_per_batch": per_file, "label_names": NAMES, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
