"""ImageNet-like training by timm's public functions, in the manner of its train.py, which its wheel does not have.

What it follows: cuDNN's autotuner on; `create_model`, channels_last, `create_optimizer_v2` (SGD with Nesterov's
momentum, no decay of biases and norms), torch.compile of the whole model where asked for, its loader with the
prefetcher that normalises on the device, autocast without a scaler for bf16, label smoothing of 0.1,
`create_scheduler_v2` asked after each update; in the loop its meters, the loss read after each update, as it does in
one process, and a line each 50 updates.

What it leaves out, so that both arms do the same: colour jitter, bicubic resizing every second time, and a rate that
changes. Pinned memory, which there is an option, is on. It knows nothing of trainkit.

    python -m tests.benchmarks.arms.timm_train JOB GO DONE
"""

import logging
import time
from contextlib import nullcontext, suppress
from functools import partial
from itertools import cycle

import torch
from timm import create_model
from timm.data import create_dataset, create_loader
from timm.data.loader import PrefetchLoader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter

from tests.benchmarks.arms.turns import Job, Over, Report, Turns, limit_memory, made, run

MOMENTUM, DECAY, SMOOTHING = 0.9, 2e-5, 0.1
LOG_EVERY = 50

log = logging.getLogger("train")


def main(job: Job, turns: Turns) -> None:
    logging.basicConfig(level=logging.INFO)
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        limit_memory(job)
    torch.manual_seed(0)
    model = create_model(job.model, pretrained=False, num_classes=job.num_classes, in_chans=3, drop_rate=0.0)
    model.to(device=device)
    model.to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=job.lr, momentum=MOMENTUM, weight_decay=DECAY)
    if job.compile:
        model = torch.compile(model, backend="inductor")
    autocast = partial(torch.autocast, device.type, torch.bfloat16) if job.precision == "bf16" else nullcontext
    loss_fn = LabelSmoothingCrossEntropy(smoothing=SMOOTHING).to(device)
    loader, per_epoch = loader_of(job, device)
    scheduler, _ = create_scheduler_v2(  # a rate that stays
        optimizer, sched="step", num_epochs=300, decay_epochs=1000, step_on_epochs=False, updates_per_epoch=per_epoch
    )
    report = Report(job)
    with suppress(Over):
        train(model, turns.taken(loader, lambda batch: report.look(batch[0])), optimizer, loss_fn, scheduler, autocast,
              report)  # fmt: skip
    report.write()


def loader_of(job: Job, device: torch.device):
    """Batches without end, and how many are an epoch."""
    if job.data is None:
        batches = made(job)
        return iter(PrefetchLoader(cycle(batches), device=device)), 1000
    dataset = create_dataset("", root=job.data, split="train", is_training=True, batch_size=job.batch)
    loader = create_loader(
        dataset, input_size=(3, job.image_size, job.image_size), batch_size=job.batch, is_training=True,
        color_jitter=None, interpolation="bilinear", num_workers=job.workers, pin_memory=device.type == "cuda",
        device=device,
    )  # fmt: skip
    return (batch for _ in cycle([0]) for batch in loader), len(loader)


def train(model, batches, optimizer, loss_fn, scheduler, autocast, report) -> None:
    update_time, data_time, losses = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    images = 0
    data_began = update_began = time.time()
    optimizer.zero_grad()
    for updates, (input, target) in enumerate(batches, 1):
        input = input.contiguous(memory_format=torch.channels_last)
        data_time.update(time.time() - data_began)
        with autocast():
            loss = loss_fn(model(input), target)
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), input.size(0))
        optimizer.zero_grad()
        images += input.size(0)
        report.losses.append(losses.val)
        report.steps.append(updates)
        now = time.time()
        update_time.update(now - update_began)
        update_began = now
        if updates % LOG_EVERY == 0:
            log.info(
                "update %d loss %.3f (%.3f) time %.3f s data %.3f s %.0f images/s lr %.1e", updates, losses.val,
                losses.avg, update_time.val, data_time.val, images / update_time.sum, optimizer.param_groups[0]["lr"],
            )  # fmt: skip
        scheduler.step_update(num_updates=updates, metric=losses.avg)
        data_began = time.time()


if __name__ == "__main__":
    run(main)
