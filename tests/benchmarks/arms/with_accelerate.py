"""`bare.py` the way Hugging Face's accelerate has it: ``python with_accelerate.py STEPS OUT``, or under torchrun."""

from __future__ import annotations

import json
import sys
import time

import torch
from accelerate import Accelerator
from bare import BATCH, LR, SEED, data, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main(steps: int, out: str) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=out + ".logs")
    accelerator.init_trackers("bare")
    torch.manual_seed(SEED)
    train, val, _ = data(None)
    ranks = accelerator.num_processes
    batches = DataLoader(train, batch_size=BATCH // ranks, shuffle=True, drop_last=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    model, optimizer, batches, validation = accelerator.prepare(
        model, optimizer, batches, DataLoader(val, batch_size=BATCH)
    )
    step, epoch, seconds = 0, 0, 0.0
    while step < steps:
        began = time.perf_counter()
        for images, labels in batches:
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": loss.item()}, step=step)
            if step == steps:
                break
        seconds += time.perf_counter() - began
        epoch += 1
        right = torch.zeros(())
        model.eval()
        with torch.no_grad():
            for images, labels in validation:
                scores, all_labels = accelerator.gather_for_metrics((model(images), labels))
                right += (scores.argmax(1) == all_labels).sum()
        model.train()
        accelerator.print(f"epoch {epoch} acc1 {100 * right.item() / len(val):.1f}")
        accelerator.save_state(out + ".state")
    accelerator.end_training()
    if accelerator.is_main_process:
        with open(out, "w") as file:
            json.dump({"train_seconds": seconds}, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
