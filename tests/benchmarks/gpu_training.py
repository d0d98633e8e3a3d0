"""``python -m tests.benchmarks.gpu_training``: images a second on a GPU to timm's training, where batches are given.

ResNet-50 and ViT-B/32 at 224 pixels, bf16, channels_last, as they are and compiled. Both arms get the same bytes in the
host's memory, bring them to the GPU by their own prefetcher and train with all that they have by default: the kit's is
its command with its records, logs and samples of the hardware (`arms/kit.py`), timm's follows its train.py
(`arms/timm_train.py`). Their first updates must have the same losses. One GPU.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.arms.turns import Job
from tests.benchmarks.gpus import MODELS, absent, images_that_fit, to_timm
from tests.benchmarks.measuring import Figure

ROUNDS, TIMED, SETTLE = 5, 50, 5


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not make the same updates.
    """
    what = "images a second on one GPU, batches given, to timm's training"
    if missing := absent(what):
        return missing
    figures = []
    for model, name in MODELS.items():
        for compile in (False, True):
            job = Job(
                model=model, image_size=224, num_classes=1000, batch=images_that_fit(), out="", compile=compile,
                settle=SETTLE, timed=TIMED,
            )  # fmt: skip
            words = f"{what}: {name}, bf16, {'compiled' if compile else 'not compiled'}"
            with TemporaryDirectory() as folder:
                figures.append(to_timm(Path(folder), job, rounds, what=words, at_least=1.1, headline=words))
    return figures


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "gpu_training"]))
