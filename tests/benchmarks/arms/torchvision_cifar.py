"""CIFAR-10 as one writes it by hand: torchvision's transforms of PIL images, a DataLoader, and a bare loop.

What whoever writes it with care has: cuDNN's autotuner on, autocast, channels_last, a fused optimizer, loader processes
that stay, pinned memory and copies that nobody waits for; the loss is read every 10 updates. It knows nothing of
trainkit.

    python -m tests.benchmarks.arms.torchvision_cifar JOB GO DONE
"""

from __future__ import annotations

import pickle
from contextlib import nullcontext, suppress
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.models import resnet18

from tests.benchmarks.arms.turns import Job, Over, Report, Turns, made, run

MOMENTUM = 0.9
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def network(info=None) -> nn.Module:
    """torchvision's ResNet-18, with the first layers that images of 32x32 are given."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class Pictures(Dataset):
    """As torchvision's CIFAR10 has them: arrays, made into PIL images when they are asked for."""

    def __init__(self, images, labels, transform) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def batches_of(job: Job):
    """Without end."""
    if job.data is None:
        normalize = transforms.Normalize(MEAN, STD)
        return ((normalize(images / 255), labels) for images, labels in cycle(made(job)))
    shifted = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*shifted, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    paths = sorted((Path(job.data) / "cifar-10-batches-py").glob("data_batch_*"))
    files = [pickle.loads(path.read_bytes(), encoding="latin1") for path in paths]
    images = numpy.concatenate([file["data"] for file in files]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    labels = [label for file in files for label in file["labels"]]
    some = len(images) * 9 // 10  # the others are for validation
    loader = DataLoader(
        Pictures(images[:some], labels[:some], transform), batch_size=job.batch, shuffle=True, drop_last=True,
        num_workers=job.workers, persistent_workers=job.workers > 0, pin_memory=job.device == "cuda",
    )  # fmt: skip
    return (batch for _ in cycle([0]) for batch in loader)


def main(job: Job, turns: Turns) -> None:
    device = torch.device(job.device)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = network().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=MOMENTUM, nesterov=True, fused=True)
    autocast = partial(torch.autocast, device.type, torch.bfloat16) if job.precision == "bf16" else nullcontext
    report, losses, images_seen = Report(job), [], 0
    model.train()
    with suppress(Over):
        for images, labels in turns.taken(batches_of(job), lambda batch: report.look(batch[0])):
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with autocast():
                loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            images_seen += len(images)
            if len(losses) % 10 == 0:
                print(f"step {len(losses)} images {images_seen} loss {loss.item():.4f}", flush=True)
    report.losses, report.steps = torch.stack(losses).tolist(), list(range(1, len(losses) + 1))
    report.write()


if __name__ == "__main__":
    run(main)
