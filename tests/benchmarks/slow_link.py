"""Two ranks with 200 Mbit/s between them.

Each rank is on a machine of its own (`machines.py`) whose network has a token bucket (tc tbf). Needs root. A ResNet-18
(45 MB of gradients) on few small images, one thread a rank, wall time; updates of plain ddp and of ddp with
``comm_hook=bf16`` take turns in the same two processes, and their first losses must be the same, up to what 16 bits
lose.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from tests.benchmarks.machines import Machines, absent, machines
from tests.benchmarks.measuring import Figure, against, take_turns, wall_seconds
from trainkit.cluster.ranks import RankEnv
from trainkit.config import plugins
from trainkit.distributed.process_group import Distributed

RATE = ("rate", "200mbit", "burst", "256kb", "latency", "50ms")
ROUNDS = 5
IMAGES = 8
PATIENCE_SECONDS = 400

Measured = dict[str, list[float]]
Work = Callable[[], None]


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not make the same updates.
    """
    if why := absent() or ("" if shutil.which("tc") else "needs tc"):
        return [Figure("two ranks on 200 Mbit/s", "", note=f"not measured: {why}")]
    with TemporaryDirectory() as folder, machines(2, Path(folder)) as net:
        for machine in (0, 1):
            bucket = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *RATE)
            subprocess.run([*net.inside(machine), *bucket], check=True)
        measured = _ranks(net, rounds)
    pairs = zip(measured["losses"]["plain"], measured["losses"]["bf16"], strict=True)
    assert all(abs(plain - bf16) <= 1e-2 * plain for plain, bf16 in pairs), "bf16 has other losses than plain ddp"
    what = "200 Mbit/s, 2 ranks, ResNet-18: bf16 gradients, to plain ddp"
    return [against(measured["seconds"], "bf16", what=what, at_least=1.5, faster=True, headline=what)]


def _ranks(net: Machines, rounds: int) -> dict[str, Any]:
    """What rank 0 has measured: seconds an update of each arm, and the losses of each arm's first updates."""
    out = net.folder / "measured.json"
    env = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": net.address(0)}
    env |= {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    words = ("tests.benchmarks.slow_link", str(out), str(rounds))
    ranks = [net.start(number, *words, env={**env, "RANK": str(number)}) for number in (0, 1)]
    for each in ranks:
        each.ends(PATIENCE_SECONDS)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def rank(out: str, rounds: int) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses: Measured = {}
    arms = {"plain": _update(losses, "plain"), "bf16": _update(losses, "bf16", comm_hook="bf16")}

    def together(work: Work) -> float:
        dist.barrier()
        return wall_seconds(work)

    for work in arms.values():
        together(work)  # memory, connections, and DDP's first step are new
    measured = take_turns({name: partial(together, work) for name, work in arms.items()}, rounds)
    if dist.get_rank() == 0:
        first = {name: values[:2] for name, values in losses.items()}
        Path(out).write_text(json.dumps({"seconds": measured, "losses": first}))
    dist.barrier()
    dist.destroy_process_group()


def _update(losses: Measured, name: str, **options: Any) -> Work:
    """An update of ddp with these options; it adds the loss of this rank to those of its name."""
    build = plugins.load("trainkit.distributed.strategies", "ddp")
    built = build(Distributed(RankEnv.from_mapping(os.environ), torch.device("cpu")), **options)
    torch.manual_seed(0)
    model = built.parallelize(resnet18(num_classes=10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch, labels = torch.randn(IMAGES, 3, 64, 64, generator=generator), torch.arange(IMAGES) % 10

    def update() -> None:
        with built.grad_sync(model, enabled=True):
            loss = cross_entropy(model(batch), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.setdefault(name, []).append(loss.item())

    return update


if __name__ == "__main__":
    rank(sys.argv[1], int(sys.argv[2]))
