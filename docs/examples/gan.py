"""A GAN of digits: two models, two optimizers, noise of one's own generator. `python gan.py`"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu
from torch.utils.data import TensorDataset

import trainkit

EPOCHS = 3
NOISE = 16
digits = TensorDataset(torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1)

with trainkit.rank() as rank:
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1))
    generator = rank.wrap(generator)
    critic = rank.wrap(critic)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    batches = rank.batches(digits, global_batch_size=60, epochs=EPOCHS)

    with rank.saved(
        generator=generator, critic=critic, generator_optimizer=generator_optimizer,
        critic_optimizer=critic_optimizer, batches=batches, mean_real=0.5,
    ) as state:  # fmt: skip
        for (real,) in batches:
            noise = torch.randn(len(real), NOISE, device=rank.device)
            fake = generator(noise)

            scores = critic(torch.cat([real, fake.detach()]))
            is_real = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(rank.device)
            critic_loss = binary_cross_entropy_with_logits(scores, is_real)
            critic_optimizer.zero_grad()
            rank.backward(critic_loss)
            rank.update(critic_optimizer)

            generator_loss = binary_cross_entropy_with_logits(critic(fake), torch.ones_like(is_real[: len(real)]))
            generator_optimizer.zero_grad()
            rank.backward(generator_loss)
            rank.update(generator_optimizer)

            rank.log(loss=generator_loss, critic_loss=critic_loss)
            state.mean_real = 0.9 * state.mean_real + 0.1 * relu(scores[: len(real)].detach()).mean().item()
            state.step()
