"""``python -m tests.benchmarks.slow_link``: two ranks with 200 Mbit/s between them.

Each rank is in a network namespace of its own, joined by a pair of virtual interfaces with a token bucket on each (tc
tbf). The namespaces belong to processes of this measurement and have no names: they are gone with it, however it ends.
Needs root. A ResNet-18 (45 MB of gradients) on small images, one thread a rank: updates of plain ddp, of ddp with
``comm_hook=bf16``, and of ddp whose gradients are all in one bucket, so that nothing is sent before the backward pass
is over; and of one rank alone, which communicates nothing. Then the scaling from one rank to two over loopback at
updates of some 100 ms, weak: each rank has the work that the one has. All arms of two ranks have the same losses in
their first updates, those in 16 bits up to what these lose.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.measuring import CONTROL, Figure, ratios, take_turns

PROJECT = Path(__file__).resolve().parents[2]
RATE = ("rate", "200mbit", "burst", "256kb", "latency", "50ms")
WARMUP, STEPS, ROUNDS = 1, 4, 2
LINK, LOOPBACK = ("10.77.0.1", "10.77.0.2"), ("127.0.0.1", "127.0.0.1")
_ENDS_WITH_US = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL)"


def measure() -> list[Figure]:
    """The lines of the table."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))):
        return [Figure("two ranks on 200 Mbit/s", "", note="not measured: it needs root, ip, tc and unshare")]
    with TemporaryDirectory() as folder, _Namespaces() as inside:
        out = Path(folder) / "out.json"
        losses: dict[str, list[float]] = {}

        def link(name: str, **options: object) -> float:
            seconds, losses[name] = _train(out, 2, inside, LINK, **options)
            return seconds

        measured = take_turns(
            {"plain": lambda: link("plain"), "bf16": lambda: link("bf16", comm_hook="bf16")},
            ROUNDS,
        )
        # With more images, so that there is a backward pass to hide behind: as long as the exchange, about.
        overlapped = take_turns(
            {
                "buckets": lambda: link("buckets", images=48),
                "one bucket": lambda: link("one bucket", images=48, bucket_cap_mb=1000),
                "no exchange": lambda: link("no exchange", images=48, exchange=False),
            },
            1,
        )
        scaled = take_turns(
            {
                "one": lambda: _train(out, 1, [[], []], LOOPBACK, images=36, small=True)[0],
                "two": lambda: _train(out, 2, [[], []], LOOPBACK, images=36, small=True)[0],
            },
            3,
        )
    for one, other, tolerance in (("plain", "bf16", 1e-2), ("buckets", "one bucket", 1e-4)):
        pairs = zip(losses[one][:3], losses[other][:3], strict=True)
        assert all(abs(a - b) <= tolerance * a for a, b in pairs), f"{other} has other losses than {one}"
    plain = statistics.median(measured["plain"])
    buckets, end, alone = (statistics.median(overlapped[name]) for name in ("buckets", "one bucket", "no exchange"))
    control = statistics.median(ratios(measured, CONTROL))
    faster = 1 / statistics.median(ratios(measured, "bf16"))
    scaling = 2 / statistics.median(ratios(scaled, "two"))
    hidden = (end - buckets) / (end - alone)
    busy = "" if abs(control - 1) <= 0.05 else "void: the control is off"
    off = "" if abs(statistics.median(ratios(scaled, CONTROL)) - 1) <= 0.05 else "void: the control is off"
    return [
        Figure(
            "200 Mbit/s, ResNet-18, two ranks: bf16 gradients to plain ddp",
            f"{faster:.2f} x; control {control:.3f}; {plain:.2f} s an update",
            "at least 1.5 x",
            None if busy else faster >= 1.5,
            busy,
        ),
        Figure(
            "the same: exposed communication, in buckets and in one at the end",
            f"{buckets - alone:.2f} s and {end - alone:.2f} s an update: {100 * hidden:.0f} % hidden behind backward",
            "some is hidden",
            None if busy else hidden > 0,
            busy,
        ),
        Figure(
            "weak scaling from 1 to 2 ranks over loopback, one thread each",
            f"{scaling:.2f} x; {statistics.median(scaled['one']) * 1e3:.0f} ms an update alone",
            "at least 1.9 x",
            None if off else scaling >= 1.9,
            off,
        ),
    ]


class _Namespaces:
    """Two network namespaces, held by a process each that ends with this one, and with the link between them."""

    def __enter__(self) -> list[list[str]]:
        hold = f"{_ENDS_WITH_US}; print(flush=True); import time; time.sleep(3600)"
        command = ["unshare", "--net", sys.executable, "-c", hold]
        self._holders = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in LINK]
        try:
            for holder in self._holders:
                assert holder.stdout is not None
                holder.stdout.readline()
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
            holder.kill()
            holder.communicate()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _train(
    out: Path, ranks: int, inside: list[list[str]], addresses: tuple[str, str], **options: object
) -> tuple[float, list[float]]:
    """Seconds an update, and the losses."""
    port = str(20000 + time.monotonic_ns() // 1000 % 20000)
    children = []
    for rank in range(ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": addresses[0], "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
        env |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": f"link{rank}" if inside[0] else "lo"}
        command = [*inside[rank], sys.executable, "-m", "tests.benchmarks.slow_link", str(out), json.dumps(options)]
        children.append(subprocess.Popen(command, env=env, cwd=PROJECT))
    try:
        assert [child.wait(timeout=300) for child in children] == [0] * ranks
    finally:
        for child in children:
            child.kill()
    facts = json.loads(out.read_text())
    return facts["seconds"], facts["losses"]


def rank(out: str, *, exchange: bool = True, images: int = 8, small: bool = False, **strategy: object) -> None:
    """What each process does: ``images`` a rank and update; ``small``: a smaller network, whose updates take 100 ms."""
    exec(_ENDS_WITH_US)  # nobody outlives the measurement
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet18

    from trainkit.distributed.process_group import Distributed
    from trainkit.ranks.env import RankEnv
    from trainkit.strategies import ddp

    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = torch.nn
    model = resnet18(num_classes=10)
    if small:
        layers = [net.Conv2d(3, 64, 3, padding=1), net.GELU(), net.Conv2d(64, 64, 3, padding=1), net.GELU()]
        model = net.Sequential(*layers, net.AdaptiveAvgPool2d(4), net.Flatten(), net.Linear(1024, 10))
    env = RankEnv.from_mapping(os.environ)
    built = ddp.build(Distributed(env, torch.device("cpu")), **strategy)  # type: ignore[arg-type]
    model = built.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(number)
    size = 24 if small else 64
    batch, labels = torch.randn(images, 3, size, size, generator=generator), torch.arange(images) % 10
    losses, seconds = [], []
    for _ in range(WARMUP + STEPS):
        began = time.perf_counter()
        with built.grad_sync(model, enabled=exchange):
            loss = cross_entropy(model(batch), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    if number == 0:
        Path(out).write_text(json.dumps({"seconds": statistics.median(seconds[WARMUP:]), "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(sys.argv[1], **json.loads(sys.argv[2]))
        raise SystemExit(0)
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "slow_link"]))
