"""Two ranks with 200 Mbit/s between them.

Each rank is on a machine of its own (`machines.py`) whose network has a token bucket (tc tbf). Needs root. A ResNet-18
(45 MB of gradients) on small images, one thread a rank, wall time; the arms take turns update by update in the same two
processes, and their first losses must be the same, those in 16 bits up to what these lose.

- bf16: updates of plain ddp, and of ddp with ``comm_hook=bf16``, with few images.
- overlap: with as many images as make forward and backward take as long as the exchange, about. What is hidden is
  (compute alone + exchange alone - both together) / exchange alone: with ddp's buckets of 25 MB, and with all gradients
  in one, which is sent when the backward pass is over, so that nothing can be hidden. Overlap is shown where the
  buckets hide more than the one does, and the difference is above what their control is off.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from tests.benchmarks.machines import Machines, absent, machines
from tests.benchmarks.measuring import Figure, against, control_of, describe, take_turns, wall_seconds
from trainkit.distributed.process_group import Distributed
from trainkit.ranks import RankEnv
from trainkit.strategies import ddp

RATE = ("rate", "200mbit", "burst", "256kb", "latency", "50ms")
ROUNDS = 5
FEW, MANY = 8, 48
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
        bits, overlap = (_ranks(net, question, rounds) for question in ("bits", "overlap"))
    for measured, one, other, tolerance in ((bits, "plain", "bf16", 1e-2), (overlap, "buckets", "one bucket", 1e-4)):
        pairs = zip(measured["losses"][one], measured["losses"][other], strict=True)
        assert all(abs(a - b) <= tolerance * a for a, b in pairs), f"{other} has other losses than {one}"
    what = "200 Mbit/s, 2 ranks, ResNet-18: bf16 gradients, to plain ddp"
    return [
        against(bits["seconds"], "bf16", what=what, at_least=1.5, faster=True, headline=what),
        _overlap(overlap["seconds"]),
    ]


def _overlap(measured: Measured) -> Figure:
    shares = {}
    for name in ("buckets", "one bucket"):
        parts = zip(measured["compute"], measured["exchange"], measured[name], strict=True)
        shares[name] = [(compute + exchange - both) / exchange for compute, exchange, both in parts]
    several, one = (statistics.median(shares[name]) for name in shares)
    seconds = {name: statistics.median(values) for name, values in measured.items()}
    control = control_of(measured)
    shown = several - one > abs(control - 1) * seconds["buckets"] / seconds["exchange"] and several > 0
    figure = (
        f"{describe(shares['buckets'], '{:.2f}'.format)}; all in one bucket {one:.2f}; seconds: compute alone "
        f"{seconds['compute']:.2f}, exchange alone {seconds['exchange']:.2f}, both {seconds['buckets']:.2f}, "
        f"with one bucket {seconds['one bucket']:.2f}"
    )
    what = "200 Mbit/s: share of the exchange hidden behind backward, in buckets of 25 MB"
    note = "" if shown else "the ranks have one core each, which sends and computes"
    return Figure(what, figure, control, "more than with one bucket", shown, note=note)


def _ranks(net: Machines, question: str, rounds: int) -> dict[str, Any]:
    """What rank 0 has measured: seconds an update of each arm, and the losses of each arm's first updates."""
    out = net.folder / f"{question}.json"
    env = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": net.address(0)}
    env |= {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    words = ("tests.benchmarks.slow_link", str(out), question, str(rounds))
    ranks = [net.start(number, *words, env={**env, "RANK": str(number)}) for number in (0, 1)]
    for each in ranks:
        each.ends(PATIENCE_SECONDS)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def rank(out: str, question: str, rounds: int) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses: Measured = {}
    arms = {"bits": _bits, "overlap": _in_buckets}[question](losses)

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


def _bits(losses: Measured) -> dict[str, Work]:
    return {
        "plain": _update(_resnet(), FEW, losses, "plain"),
        "bf16": _update(_resnet(), FEW, losses, "bf16", comm_hook="bf16"),
    }


def _in_buckets(losses: Measured) -> dict[str, Work]:
    model = _resnet()
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters())).split(25 << 18)

    def exchange() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in gradients]:
            work.wait()

    return {
        "buckets": _update(model, MANY, losses, "buckets"),
        "one bucket": _update(_resnet(), MANY, losses, "one bucket", bucket_cap_mb=1000),
        "compute": _update(_resnet(), MANY, {}, "compute", exchange=False),
        "exchange": exchange,
    }


def _update(
    model: nn.Module, images: int, losses: Measured, name: str, *, exchange: bool = True, **options: Any
) -> Work:
    """An update with ``images`` on each rank; it adds the loss of this rank to those of its name."""
    built = ddp.build(Distributed(RankEnv.from_mapping(os.environ), torch.device("cpu")), **options)
    wrapped = built.parallelize(model) if exchange else model  # ddp's forward may wait for the others without sync, too
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch, labels = torch.randn(images, 3, 64, 64, generator=generator), torch.arange(images) % 10

    def update() -> None:
        with built.grad_sync(wrapped, enabled=True) if exchange else nullcontext():
            loss = cross_entropy(wrapped(batch), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.setdefault(name, []).append(loss.item())

    return update


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    return resnet18(num_classes=10)  # type: ignore[no-any-return]


if __name__ == "__main__":
    rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
