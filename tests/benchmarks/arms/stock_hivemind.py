"""`hivemind.Optimizer` as it is, by its documentation: one peer that trains `patient_task`.

Its quickstart's arguments, in the class's default mode (synchronous, large batches), with what version 1.1.12 needs to
run at all: ``client_mode``, which it otherwise takes from the wrong place, and a ``request_timeout`` below the time for
matchmaking. The peers begin together, when all of them are there.

    python -m tests.benchmarks.arms.stock_hivemind JOB
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

MATCHMAKING, TIMEOUT = 3.0, 10.0  # its quickstart's


@dataclass(frozen=True)
class Job:
    """What a peer is told, as JSON."""

    host: str
    place: str
    """Of this peer in ``folder``."""
    folder: str
    """Where they find each other: `address`, and a file of each."""
    peers: int
    updates: int
    target: int
    """Samples of an update, of all peers together."""
    micro: int
    lr: float
    seed: int
    fp16: bool
    """Gradients and states, as in hivemind's ALBERT example; by default it compresses nothing."""


def main(job: Job) -> None:
    multiprocessing.set_start_method("fork", force=True)
    import hivemind
    import torch
    from hivemind.compression import Float16Compression, NoCompression
    from hivemind.optim.grad_averager import GradientAverager
    from torch.nn.functional import cross_entropy
    from torch.optim.lr_scheduler import LambdaLR

    from tests.benchmarks.arms import patient_task
    from trainkit.config.schema import OptimConfig, ScheduleConfig
    from trainkit.training.optim import lr_at

    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    splits, folder = patient_task.data(Path("data")), Path(job.folder)
    model = patient_task.model(splits.info)
    initial = [] if job.place == "0" else (folder / "address").read_text().split()
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{job.host}/tcp/0"], initial_peers=initial, start=True)
    written = folder / "address.part"
    if job.place == "0":
        written.write_text("\n".join(map(str, dht.get_visible_maddrs())))
        written.rename(folder / "address")

    def rate(step: int) -> float:
        settings, schedule = OptimConfig(lr=job.lr), ScheduleConfig(name="onecycle", warmup_epochs=1)
        per_epoch = max(1, len(splits.train) // job.target)
        last = min(step, job.updates - 1)
        return (
            lr_at(last, optim=settings, schedule=schedule, steps_per_epoch=per_epoch, total_steps=job.updates) / job.lr
        )

    codec = Float16Compression() if job.fp16 else NoCompression()
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="stock",
        target_batch_size=job.target,
        batch_size_per_step=job.micro,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=job.lr, weight_decay=0.05),
        scheduler=lambda one: LambdaLR(one, rate),
        matchmaking_time=MATCHMAKING,
        averaging_timeout=TIMEOUT,
        client_mode=dht.client_mode,
        grad_compression=codec,
        state_averaging_compression=codec,
        averager_opts={"request_timeout": 1.0},
        grad_averager_factory=partial(GradientAverager, request_timeout=1.0),
    )
    (folder / f"ready-{job.place}").touch()
    while len(list(folder.glob("ready-*"))) < job.peers:
        time.sleep(0.1)
    generator = torch.Generator().manual_seed(1000 * job.seed + int(job.place))
    samples, began, busy, joint = 0, time.monotonic(), 0.0, 0
    model.train()
    while optimizer.local_epoch < job.updates:
        started, epoch = time.monotonic(), optimizer.local_epoch
        chosen = torch.randint(len(splits.train), (job.micro,), generator=generator)
        images = (splits.train.images[chosen].float() / 255 - splits.info.mean[0]) / splits.info.std[0]
        optimizer.zero_grad()
        cross_entropy(model(images), splits.train.labels[chosen]).backward()
        busy += time.monotonic() - started
        optimizer.step()
        samples += job.micro
        joint += optimizer.local_epoch > epoch and optimizer.tracker.global_progress.num_peers == job.peers
    seconds = time.monotonic() - began
    model.eval()
    with torch.no_grad():
        images = (splits.val.images.float() / 255 - splits.info.mean[0]) / splits.info.std[0]
        accuracy = 100 * (model(images).argmax(1) == splits.val.labels).float().mean().item()
    told = {"samples": samples, "seconds": seconds, "busy": busy, "accuracy": accuracy, "joint": joint}
    print(json.dumps(told), flush=True)
    (folder / f"done-{job.place}").write_text(json.dumps(told))
    while len(list(folder.glob("done-*"))) < job.peers:  # the others may still be fetching from this one
        time.sleep(0.1)
    os._exit(0)  # `shutdown` waits for averagers that nobody needs any more


def words(job: Job) -> tuple[str, ...]:
    """The command line of a peer, behind ``python -m``."""
    return ("tests.benchmarks.arms.stock_hivemind", json.dumps(asdict(job)))


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
