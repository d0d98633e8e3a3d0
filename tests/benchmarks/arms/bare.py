"""The plain PyTorch way: a script to be started by hand, or by torchrun for more ranks. It knows nothing of trainkit.

The network of `fashion_cnn` on scikit-learn's digits: a DataLoader that shifts each image by a random pixel, DDP where
there are several ranks, AdamW, the loss printed every 10 updates, validation and `torch.save` once an epoch.

    python bare.py STEPS OUT [SAME]

OUT gets what was measured, as JSON. SAME is a file of images, labels, batches and initial weights: then these are used
as they are, and OUT has the loss of every update.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

BATCH, LR, SEED = 64, 2e-3, 0


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.GELU()]
    layers.insert(6, nn.AvgPool2d(2))
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.0), nn.Linear(256, 10))


class Digits(Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:  # RandomCrop(8, padding=1), without the seconds that torchvision's import takes
            padded = nn.functional.pad(image, (1, 1, 1, 1))
            top, left = torch.randint(0, 3, (2,)).tolist()
            image = padded[:, top : top + 8, left : left + 8]
        return (image.float() / 255 - 0.3054) / 0.3761, self.labels[index]


def data(same):
    if same is not None:
        given = torch.load(same)
        return Digits(given["images"], given["labels"], False), Digits(given["images"], given["labels"], False), given
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images * 255 / 16).round().to(torch.uint8)[:, None]
    labels, order = torch.tensor(digits.target), torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val = order[:1257], order[1257:1527]
    return Digits(images[train], labels[train], True), Digits(images[val], labels[val], False), None


def main(steps: int, out: str, same: str | None = None) -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = network()
    train, val, given = data(same)
    if given is not None:
        model.load_state_dict(given["weights"])
        batches = DataLoader(
            train, batch_sampler=[b[rank * BATCH // ranks :][: BATCH // ranks] for b in given["batches"]]
        )
    else:
        sampler = DistributedSampler(train, drop_last=True) if ranks > 1 else RandomSampler(train)
        batches = DataLoader(train, batch_size=BATCH // ranks, sampler=sampler, drop_last=True)
    validation = DataLoader(val, batch_size=BATCH)
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    step, epoch, seconds, losses = 0, 0, 0.0, []
    first = time.time()
    while step < steps:
        if ranks > 1 and given is None:
            sampler.set_epoch(epoch)
        began = time.perf_counter()
        for images, labels in batches:
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if given is not None:
                of_all = loss.detach() / ranks
                if ranks > 1:
                    dist.all_reduce(of_all)
                losses.append(of_all.item())
            elif step % 10 == 0 and rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step == steps:
                break
        seconds += time.perf_counter() - began
        last = time.time()
        epoch += 1
        if rank == 0:
            right = 0
            model.eval()
            with torch.no_grad():
                for images, labels in validation:
                    right += (model(images).argmax(1) == labels).sum().item()
            model.train()
            print(f"epoch {epoch} acc1 {100 * right / len(val):.1f}", flush=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, out + ".pt")
    if rank == 0:
        with open(out, "w") as file:
            json.dump({"train_seconds": seconds, "losses": losses, "first": first, "last": last}, file)
    if ranks > 1:
        dist.barrier()  # who leaves while another still works was seen to be aborted at its exit by torch
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
