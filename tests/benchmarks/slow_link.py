"""``python -m tests.benchmarks.slow_link``: two ranks with 200 Mbit/s between them, and scaling.

Each rank is in a network namespace of its own, joined by a pair of virtual interfaces with a token bucket on each (tc
tbf). The namespaces have no names and belong to processes that end when this one does, however it does: so do they.
Needs root. A ResNet-18 (45 MB of gradients) on small images, one thread a rank, wall time; the arms take turns update
by update in the same two processes, and their first losses must be the same, those in 16 bits up to what these lose.

- bf16: updates of plain ddp, and of ddp with ``comm_hook=bf16``, with few images.
- overlap: with as many images as make forward and backward take as long as the exchange, about. What is hidden is
  (compute alone + exchange alone - both together) / exchange alone: with ddp's buckets of 25 MB, and with all gradients
  in one, which is sent when the backward pass is over, so that nothing can be hidden. Overlap is shown where the
  buckets hide more than the one does, and the difference is above what their control is off.
- scaling, weak (each rank has the work that the one has), over loopback: a smaller network, as many images as make an
  update take 100 ms on one thread.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.measuring import Figure, against, control_of, describe, take_turns, wall_seconds
from tests.benchmarks.processes import end_with

PROJECT = Path(__file__).resolve().parents[2]
RATE = ("rate", "200mbit", "burst", "256kb", "latency", "50ms")
ROUNDS = 5
UPDATES = 5
"""Of 100 ms, in each turn."""
FEW, MANY = 8, 48
LINK, LOOPBACK = ("10.77.0.1", "10.77.0.2"), ("127.0.0.1", "127.0.0.1")
PATIENCE_SECONDS = 400

Measured = dict[str, list[float]]


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not make the same updates.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))):
        return [Figure("two ranks on 200 Mbit/s", "", note="not measured: it needs root, ip, tc and unshare")]
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        with _Namespaces() as inside:
            bits, overlap = (_ranks(out, question, rounds, inside, LINK) for question in ("bits", "overlap"))
        scaling = _ranks(out, "scaling", 2 * rounds + 1, [[], []], LOOPBACK)
    for measured, one, other, tolerance in ((bits, "plain", "bf16", 1e-2), (overlap, "buckets", "one bucket", 1e-4)):
        pairs = zip(measured["losses"][one], measured["losses"][other], strict=True)
        assert all(abs(a - b) <= tolerance * a for a, b in pairs), f"{other} has other losses than {one}"
    what = "200 Mbit/s, 2 ranks, ResNet-18: bf16 gradients, to plain ddp"
    return [
        against(bits["seconds"], "bf16", what=what, at_least=1.5, faster=True, headline=what),
        _overlap(overlap["seconds"]),
        _scaling(scaling["seconds"]),
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
    return Figure(
        "200 Mbit/s: share of the exchange hidden behind backward, in buckets of 25 MB",
        f"{describe(shares['buckets'], '{:.2f}'.format)}; all in one bucket {one:.2f}; seconds: compute alone "
        f"{seconds['compute']:.2f}, exchange alone {seconds['exchange']:.2f}, both {seconds['buckets']:.2f}, "
        f"with one bucket {seconds['one bucket']:.2f}",
        control,
        "more than with one bucket",
        shown,
        note="" if shown else "the ranks have one core each, which sends and computes",
    )


def _scaling(measured: Measured) -> Figure:
    pairs = zip(measured["one"], measured["control"], measured["two"], strict=True)
    speedups = [(first + second) / two for first, second, two in pairs]  # twice the work in the time of two
    speedup = statistics.median(speedups)
    alone = statistics.median(measured["one"]) * 1e3
    met = speedup >= 1.9
    return Figure(
        "weak scaling from 1 to 2 ranks over loopback, one thread each",
        f"{describe(speedups, '{:.2f} x'.format)}; {alone:.0f} ms an update alone",
        control_of(measured),
        "at least 1.90 x",
        met,
        note="" if met else "the cores share their memory and caches",
    )


class _Namespaces:
    """Two network namespaces with the link between them, held by a ``cat`` each, whose input ends with this process."""

    def __enter__(self) -> list[list[str]]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._holders = [subprocess.Popen(["unshare", "--net", "cat"], bufsize=0, **pipes) for _ in LINK]
        try:
            for holder in self._holders:
                assert holder.stdin is not None
                assert holder.stdout is not None
                holder.stdin.write(b"there?\n")
                holder.stdout.readline()  # it is in its namespace
            first, second = (holder.pid for holder in self._holders)
            inside = [["nsenter", "--target", str(pid), "--net"] for pid in (first, second)]
            # Made in the first namespace, one end moved into the second: none is ever in that of the machine.
            _run(*inside[0], "ip", "link", "add", "link0", "type", "veth", "peer", "name", "link1")
            _run(*inside[0], "ip", "link", "set", "link1", "netns", str(second))
            for number, (enter, address) in enumerate(zip(inside, LINK, strict=True)):
                name = f"link{number}"
                _run(*enter, "ip", "address", "add", f"{address}/24", "dev", name)
                _run(*enter, "ip", "link", "set", name, "up")
                _run(*enter, "ip", "link", "set", "lo", "up")
                _run(*enter, "tc", "qdisc", "add", "dev", name, "root", "tbf", *RATE)
            return inside
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for holder in self._holders:
            holder.communicate()  # closes its input


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _ranks(
    out: Path, question: str, rounds: int, inside: list[list[str]], addresses: tuple[str, str]
) -> dict[str, Any]:
    """What rank 0 has measured: seconds an update of each arm, and the losses of each arm's first updates."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    children = []
    for number in (0, 1):
        env = {**os.environ, "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": addresses[0], "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
        env |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": f"link{number}" if inside[0] else "lo"}
        command = [*inside[number], sys.executable, "-m", "tests.benchmarks.slow_link"]
        command += [str(os.getpid()), str(out), question, str(rounds)]
        children.append(subprocess.Popen(command, env=env, cwd=PROJECT))
    try:
        assert [child.wait(timeout=PATIENCE_SECONDS) for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def rank(out: str, question: str, rounds: int) -> None:
    """What each of the two processes does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses: dict[str, list[float]] = {}
    arms = {"bits": _bits, "overlap": _in_buckets, "scaling": _one_and_two}[question](losses)

    def together(work: Callable[[], None]) -> float:
        dist.barrier()
        return wall_seconds(work)

    for work in arms.values():
        together(work)  # memory, connections, and DDP's first step are new
    measured = take_turns({name: partial(together, work) for name, work in arms.items()}, rounds)
    if question == "scaling":
        measured = {name: [seconds / UPDATES for seconds in values] for name, values in measured.items()}
    if dist.get_rank() == 0:
        first = {name: values[:2] for name, values in losses.items()}
        Path(out).write_text(json.dumps({"seconds": measured, "losses": first}))
    dist.barrier()
    dist.destroy_process_group()


def _bits(losses: dict[str, list[float]]) -> dict[str, Callable[[], None]]:
    return {
        "plain": _update(_resnet(), FEW, losses, "plain"),
        "bf16": _update(_resnet(), FEW, losses, "bf16", comm_hook="bf16"),
    }


def _in_buckets(losses: dict[str, list[float]]) -> dict[str, Callable[[], None]]:
    import torch
    import torch.distributed as dist

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


def _one_and_two(losses: dict[str, list[float]]) -> dict[str, Callable[[], None]]:
    import torch
    import torch.distributed as dist

    few = _update(_small(), FEW, {}, "few", exchange=False)
    few()
    images = torch.tensor([FEW * 0.1 / min(wall_seconds(few) for _ in range(5))])
    dist.broadcast(images, 0)
    one = _update(_small(), round(images.item()), {}, "one", exchange=False)
    two = _update(_small(), round(images.item()), losses, "two")

    def several(update: Callable[[], None], ranks: int) -> None:
        for _ in range(UPDATES if dist.get_rank() < ranks else 0):
            update()

    return {"one": partial(several, one, 1), "two": partial(several, two, 2)}


def _update(
    model: Any, images: int, losses: dict[str, list[float]], name: str, *, exchange: bool = True, **options: Any
) -> Callable[[], None]:
    """An update of so many images a rank; it adds the loss of this rank to those of its name."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    from trainkit.distributed.process_group import Distributed
    from trainkit.ranks.env import RankEnv
    from trainkit.strategies import ddp

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


def _resnet() -> Any:
    import torch
    from torchvision.models import resnet18

    torch.manual_seed(0)
    return resnet18(num_classes=10)


def _small() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, 2, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10))


if __name__ == "__main__":
    if len(sys.argv) == 5:  # a rank
        end_with(int(sys.argv[1]))
        rank(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        raise SystemExit(0)
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "slow_link"]))
