"""A ResNet-18 with trainkit, which also saves, goes on, and writes records."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

import trainkit
from tests.benchmarks.arms.script_hooks import images, tell, timed

epochs, batch_size = int(sys.argv[1]), int(sys.argv[2])
with trainkit.rank() as rank:
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    model = rank.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = rank.batches(images(), global_batch_size=batch_size, epochs=epochs, shuffle=False)
    model.train()
    with rank.saved(model=model, optimizer=optimizer, loader=loader) as state:
        for inputs, labels in timed(loader):
            loss = cross_entropy(model(inputs), labels)
            rank.backward(loss)
            rank.update(optimizer)
            tell(loss)
            rank.log(loss=loss)
            state.step()
