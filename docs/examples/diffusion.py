"""A small diffusion model of digits, conditional on the class. `python diffusion.py`"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import trainkit

EPOCHS = 3
STEPS = 100
digits = load_digits()
data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1, torch.tensor(digits.target))


class Denoiser(nn.Module):
    """Tells the noise in a noisy image [N, 64] from its time [N] and its class [N]."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 64)
        self.kind = nn.Embedding(10, 64)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, times, kinds):
        return self.scale * self.body(images + self.time(times) + self.kind(kinds))


with trainkit.rank() as rank:
    model = rank.wrap(Denoiser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = rank.batches(data, global_batch_size=60, epochs=EPOCHS)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.1, STEPS, device=rank.device), dim=0)

    with rank.saved(model=model, optimizer=optimizer, batches=batches, losses=[]) as state:
        for images, kinds in batches:
            times = torch.randint(STEPS, (len(images),), device=rank.device)
            noise = torch.randn_like(images)
            share = kept[times][:, None]
            noisy = share.sqrt() * images + (1 - share).sqrt() * noise
            loss = mse_loss(model(noisy, times, kinds), noise)
            rank.backward(loss)
            rank.update(optimizer, clip_norm=1.0)
            rank.log(loss=loss)
            if batches.ends_epoch:
                state.losses.append(loss.item())
            state.step()
