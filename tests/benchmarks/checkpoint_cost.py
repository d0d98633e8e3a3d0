"""``python -m tests.benchmarks.checkpoint_cost [--cpus N]``: how long a checkpoint keeps training waiting.

ResNet-50 with AdamW, 307 MB. Arms: ``torch.save`` of the same tensors into one file (no hash, no fsync, no rename), and
the kit's save, which returns when it has its copy. They alternate, wall time of the one thread that trains is measured;
a control of ``torch.save`` against itself must lie within 0.9 to 1.1, or the run is void. What the thread that writes
costs is said beside it: CPU time in all, and how much longer updates of about 1 s take while it works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from tests.benchmarks.measuring import describe
from trainkit.checkpoint.saving import Checkpoints
from trainkit.checkpoint.state import moments_of, weights_of
from trainkit.distributed.process_group import Distributed
from trainkit.ranks.env import RankEnv

ROUNDS = 5


def main() -> int:
    """Measure and print; 1 if the control says that the run is void."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpus", type=int, help="how many of the cores to use")
    if cpus := parser.parse_args().cpus:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    torch.set_num_threads(1)
    model, optimizer = trained()
    tensors = {**weights_of(model), **moments_of(model, optimizer)}
    size = sum(value.numel() * value.itemsize for value in tensors.values())
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name) / "checkpoints", Path(name) / "plain.pt"
        dist = Distributed(RankEnv.single(), torch.device("cpu"))
        checkpoints = Checkpoints(folder, keep=1, dist=dist, asynchronous=True)
        step = 0

        def kit() -> None:
            nonlocal step
            step += 1
            checkpoints.save(model, optimizer, step=step, state={}, best_step=None)

        def plain() -> None:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

        first = waited(kit)
        checkpoints.settle()
        plain()
        kept = load_file(folder / "latest/model.safetensors")
        loaded = torch.load(file, weights_only=True)["model"]
        if not all(torch.equal(kept[name], value) for name, value in loaded.items()):
            print("The two do not hold the same, so their times say nothing.")
            return 1
        plains, kits, controls, cpu_ratios, cpu, durable, slower = [], [], [], [], [], [], []
        for _ in range(ROUNDS):
            times, own = [], []
            for arm in (plain, kit, kit, plain, plain):
                began, used, mine = time.perf_counter(), time.process_time(), time.thread_time()
                times.append(waited(arm))
                own.append(time.thread_time() - mine)
                checkpoints.settle()
                if arm is kit:
                    durable.append(time.perf_counter() - began)
                    cpu.append(time.process_time() - used)
            plains.append((times[0] + times[3]) / 2)
            kits.append((times[1] + times[2]) / 2)
            controls.append(times[4] / times[3])
            cpu_ratios.append((own[1] + own[2]) / (own[0] + own[3]))
            alone = waited(updates)
            kit()
            slower.append(waited(updates) / alone)
            checkpoints.settle()
    ratios = [kit_one / plain_one for kit_one, plain_one in zip(kits, plains, strict=True)]
    control, middle = statistics.median(controls), statistics.median
    print(f"{size / 1e6:.0f} MB; torch.save keeps training waiting {1e3 * middle(plains):.0f} ms")
    print(f"the kit {1e3 * middle(kits):.0f} ms, the first time {1e3 * first:.0f}")
    print(f"ratio {describe(ratios)}, control {control:.3f}")
    print(f"and of the CPU time of the thread that trains {describe(cpu_ratios)}")
    print(f"on the disk after {middle(durable):.2f} s, for {middle(cpu):.2f} s of CPU in all")
    print(f"updates take meanwhile, to those with nothing written: {describe(slower)}")
    if not 0.9 <= control <= 1.1:
        print("The control is off: the machine was not quiet, the run is void.")
        return 1
    return 0


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A ResNet-50 after an update of AdamW."""
    from torchvision.models import resnet50

    model: nn.Module = resnet50()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def updates() -> None:
    """A second of what training does."""
    a = torch.randn(1000, 1000)
    for _ in range(40):
        a = torch.tanh(a @ a)


def waited(what: Callable[[], None]) -> float:
    """Seconds until it returns."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
