"""Self-distillation: a student follows a teacher that is the average of what it was. `python distillation.py`"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import log_softmax, softmax
from torch.utils.data import Dataset

import trainkit

EPOCHS = 3


class TwoViews(Dataset):
    """Two noisy views of each digit. What it draws is a function of seed, epoch and sample, in any process."""

    def __init__(self):
        self.images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return image + 0.1 * torch.randn(64), image + 0.1 * torch.randn(64)


with trainkit.rank() as rank:
    student = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
    teacher = copy.deepcopy(student).requires_grad_(False)
    student = rank.wrap(student)
    teacher = rank.wrap(teacher)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    batches = rank.batches(TwoViews(), global_batch_size=60, epochs=EPOCHS, workers=1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    center = torch.zeros(32, device=rank.device)
    everything = batches.dataset.images.to(rank.device)

    with rank.saved(
        student=student, teacher=teacher, optimizer=optimizer, warmup=warmup, batches=batches, center=center
    ) as state:
        for epoch in batches.epochs():
            for one, other in epoch:
                target = teacher(other)
                loss = (
                    -(softmax((target - center) / 0.04, dim=1) * log_softmax(student(one) / 0.1, dim=1)).sum(1).mean()
                )
                rank.backward(loss)
                rank.update(optimizer, clip_norm=3.0)
                warmup.step()
                with torch.no_grad():
                    center.lerp_(rank.mean(target.mean(0)), 0.1)
                    for average, own in zip(teacher.parameters(), student.parameters(), strict=True):
                        average.lerp_(own, 0.01)
                rank.log(loss=loss)
                state.step()
            with torch.no_grad():
                rank.log("val", spread=teacher(everything).std(0).mean())
