"""A ResNet-18 on one device."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from tests.benchmarks.arms.script_hooks import images, tell, timed

epochs, batch_size = int(sys.argv[1]), int(sys.argv[2])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = resnet18(num_classes=10)
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(images(), batch_size=batch_size)
model.train()
for _ in range(epochs):
    for inputs, labels in timed(loader):
        inputs, labels = inputs.to(device), labels.to(device)
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(loss)
