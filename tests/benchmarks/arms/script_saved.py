"""A ResNet-18 with trainkit, which also saves, goes on, and writes records."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.models import resnet18

import trainkit
from tests.benchmarks.arms.script_hooks import images, tell, timed

epochs, batch_size = int(sys.argv[1]), int(sys.argv[2])
rank = trainkit.rank("train.precision=fp32")
torch.manual_seed(0)
model = resnet18(num_classes=10)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(images(), batch_size=batch_size)
model, optimizer, loader = rank.wrap(model, optimizer, loader)
state = rank.saved(model=model, optimizer=optimizer, loader=loader)
model.train()
for _ in loader.epochs(epochs):
    for inputs, labels in timed(loader):
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(loss)
        rank.log(loss=loss)
        state.step()
