"""`hivemind.Optimizer` as it is: one peer that trains `patient_task`.

With the arguments of hivemind's quickstart and the fp16 of its ALBERT example, and what version 1.1.12 needs to run at
all: ``client_mode``, which it otherwise takes from the wrong place, and a ``request_timeout`` below the time for
matchmaking. Peers begin together, when all of them are there.

    python -m tests.benchmarks.arms.stock_swarm JOB
"""

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
    place: int
    """Of this peer; 0 is the first one."""
    folder: str
    """Where they find each other: ``address``, and a file of each."""
    peers: int
    exchanges: int
    target: int
    """Samples from one exchange to the next, of all peers together."""
    batch: int
    """Of an update of one peer, or of what it adds to the gradient of one."""
    lr: float
    seed: int
    local: bool
    """Each peer makes updates of its own and their weights are averaged, in place of gradients."""

    @property
    def words(self) -> tuple[str, ...]:
        """The command line, behind ``python -m``."""
        return ("tests.benchmarks.arms.stock_swarm", json.dumps(asdict(self)))


def main(job: Job) -> None:
    multiprocessing.set_start_method("fork", force=True)
    import hivemind
    import torch
    from hivemind.compression import Float16Compression
    from hivemind.optim.grad_averager import GradientAverager
    from torch.nn.functional import cross_entropy
    from torch.optim.lr_scheduler import LambdaLR

    from tests.benchmarks.arms import patient_task
    from trainkit.config.loading import load
    from trainkit.training.schedule import lr_at

    torch.manual_seed(job.seed)
    splits, folder, config = patient_task.data(Path("data")), Path(job.folder), load("hivemind").config
    model = patient_task.model(splits.info, width=256)
    initial = (folder / "address").read_text().split() if job.place else []
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{job.host}/tcp/0"], initial_peers=initial, start=True)
    if not job.place:
        (folder / "address.part").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        (folder / "address.part").rename(folder / "address")

    def rate(exchange: int) -> float:
        settings, epochs = config.optim.model_copy(update={"lr": 1.0}), config.train.epochs
        steps = max(job.exchanges, epochs)  # the schedule is that of the kit's arm, over the exchanges
        now = min(exchange, job.exchanges - 1) * steps // job.exchanges
        return lr_at(now, optim=settings, schedule=config.schedule, steps_per_epoch=steps // epochs, total_steps=steps)

    optimizer = hivemind.Optimizer(
        dht=dht, run_id="stock", target_batch_size=job.target, batch_size_per_step=job.batch, params=model.parameters(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=job.lr, weight_decay=config.optim.weight_decay),
        scheduler=lambda one: LambdaLR(one, rate), matchmaking_time=MATCHMAKING, averaging_timeout=TIMEOUT,
        use_local_updates=job.local, client_mode=dht.client_mode, grad_compression=Float16Compression(),
        state_averaging_compression=Float16Compression(), averager_opts={"request_timeout": 1.0},
        grad_averager_factory=None if job.local else partial(GradientAverager, request_timeout=1.0),
    )  # fmt: skip
    (folder / f"ready-{job.place}").touch()
    while len(list(folder.glob("ready-*"))) < job.peers:
        time.sleep(0.1)
    generator = torch.Generator().manual_seed(1000 * job.seed + job.place)
    mean, std = splits.info.mean[0], splits.info.std[0]
    samples, began, busy = 0, time.monotonic(), 0.0
    model.train()
    while optimizer.local_epoch < job.exchanges:
        started = time.monotonic()
        chosen = torch.randint(len(splits.train), (job.batch,), generator=generator)
        images = (splits.train.images[chosen].float() / 255 - mean) / std
        optimizer.zero_grad()
        cross_entropy(model(images), splits.train.labels[chosen]).backward()
        busy += time.monotonic() - started
        optimizer.step()
        samples += job.batch
    seconds = time.monotonic() - began
    model.eval()
    with torch.no_grad():
        output = model((splits.val.images.float() / 255 - mean) / std)
    accuracy = 100 * (output.argmax(1) == splits.val.labels).float().mean().item()
    loss = cross_entropy(output, splits.val.labels).item()
    told = {"samples": samples, "utilisation": busy / seconds, "accuracy": accuracy, "loss": loss}
    (folder / f"done-{job.place}").write_text(json.dumps(told))
    while len(list(folder.glob("done-*"))) < job.peers:  # the others may still be fetching from this one
        time.sleep(0.1)
    os._exit(0)  # `shutdown` waits for averagers that nobody needs any more


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
