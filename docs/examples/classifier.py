"""A classifier of digits: the few lines of trainkit in a loop of one's own. `python classifier.py`"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

import trainkit

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=2e-3)
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
everything = TensorDataset(images, torch.tensor(digits.target))
train = Subset(everything, range(1500))
test_images, test_labels = everything[1500:]

rank = trainkit.rank()
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
)  # fmt: skip
model = rank.wrap(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
batches = rank.batches(train, global_batch_size=60, epochs=args.epochs)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=len(batches))

state = rank.saved(model=model, optimizer=optimizer, schedule=schedule, batches=batches, best=0.0)
for images, labels in batches:
    model.train()
    loss = cross_entropy(model(images), labels)
    rank.backward(loss)
    rank.update(optimizer, clip_norm=1.0)
    schedule.step()
    rank.log(loss=loss, lr=schedule.get_last_lr()[0])

    if batches.ends_epoch:
        model.eval()
        with torch.no_grad():
            scores = model(test_images.to(rank.device))
        acc1 = 100 * (scores.argmax(1).cpu() == test_labels).float().mean().item()
        rank.log("val", acc1=acc1, loss=cross_entropy(scores.cpu(), test_labels))
        state.best = max(state.best, acc1)

    state.step()

if rank.is_main:
    print(f"best accuracy {state.best:.1f} %")
