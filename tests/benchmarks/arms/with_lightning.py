"""`bare.py` the way Lightning has it: ``python with_lightning.py STEPS OUT [RANKS]``; it starts its ranks itself."""

from __future__ import annotations

import json
import os
import sys
import time

import lightning
import torch
from bare import BATCH, LR, SEED, data, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch, index):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("acc1", (self.model(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0, fused=True)


def main(steps: int, out: str, ranks: int = 1) -> None:
    lightning.seed_everything(SEED, verbose=False)
    train, val, _ = data(None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=steps,
        log_every_n_steps=10,
        default_root_dir=out + ".logs",
        enable_model_summary=False,
    )
    batches = DataLoader(train, batch_size=BATCH // ranks, shuffle=True, drop_last=True)
    began = time.perf_counter()
    trainer.fit(Module(), batches, DataLoader(val, batch_size=BATCH))
    seconds = time.perf_counter() - began
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with open(out, "w") as file:
            json.dump({"train_seconds": seconds}, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
