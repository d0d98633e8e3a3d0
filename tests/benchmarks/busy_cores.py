"""What it saves, and costs, that threads sleep where others want the cores.

The same updates with OpenMP's own way of waiting and with ours (`trainkit.distributed.process_group`), on all cores:
at first alone, then beside four programs a core that never stop. Arms are processes that take turns; what waits for
its turn reads a pipe. Each round has new processes: two of the same arm differ by more than the arms do, so the
control is a process of its own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from tests.benchmarks.measuring import CONTROL, Figure, against

ROUNDS = 5
TURNS, TURN = 10, 0.25
"""Of a process where the cores are free, and seconds of each: or one update, if that takes longer."""
BUSY_TURNS, BUSY_TURN = 3, 2.0
LOAD = 4
"""Busy programs a core."""
MODELS = {"fashion_cnn": (64, 1, 8), "resnet18": (32, 3, 64)}
"""Images in a batch, their channels and side."""
OWN = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
OPENMP, OURS = "OpenMP's own", "ours"
WAYS = {
    OPENMP: "",
    OURS: "from trainkit.distributed.process_group import sharing_cores; held = sharing_cores(); held.__enter__()",
}
ARM = """
import sys
way, name, batch, channels, side = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
import time
import torch
from trainkit.config.schema import Config
from trainkit.data.base import DataInfo
from trainkit.models import build_model
torch.manual_seed(0)
images, labels = torch.randn(batch, channels, side, side), torch.randint(0, 10, (batch,))
half = (0.5,) * channels
info = DataInfo("random", 10, channels, side, tuple("0123456789"), half, half)
model = build_model(Config.model_validate({"model": {"name": name}}).model, info, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
def update():
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()
print([update() for _ in range(5)], flush=True)
exec(way)
for line in sys.stdin:
    began, updates, took = time.perf_counter(), 0, 0.0
    while updates == 0 or took < float(line):
        update()
        updates, took = updates + 1, time.perf_counter() - began
    print(took / updates, flush=True)
"""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table."""
    return [figure for name in MODELS for figure in _of(name, rounds)]


def _of(name: str, rounds: int) -> Iterator[Figure]:
    arms = {**WAYS, CONTROL: WAYS[OPENMP]}
    free: dict[str, list[float]] = {arm: [] for arm in arms}
    busy: dict[str, list[float]] = {arm: [] for arm in arms}

    def shown(seconds: float) -> str:
        return f"{MODELS[name][0] / seconds:,.0f} images/s"

    for _ in range(rounds):
        with ExitStack() as held:
            words = [name, *map(str, MODELS[name])]
            processes = {arm: held.enter_context(_process(ARM, way, *words)) for arm, way in arms.items()}
            losses = {arm: process.stdout.readline() for arm, process in processes.items() if process.stdout}
            assert len(set(losses.values())) == 1, losses  # bit for bit
            _measure(processes, free, TURNS, TURN)
            for _ in range(LOAD * len(os.sched_getaffinity(0))):
                held.enter_context(_process("while True: pass"))
            _measure(processes, busy, BUSY_TURNS, BUSY_TURN)
    beside = f"beside {LOAD} busy programs a core"
    what = f"{name}, all cores free: images/s where threads may sleep, to OpenMP's own"
    yield against(free, OURS, at_least=0.97, faster=True, shown=shown, what=what)
    what = f"{name}, {beside}: images/s where threads sleep, to OpenMP's own"
    headline = f"{name} on the CPU {beside}, to OpenMP's own way of waiting"
    yield against(busy, OURS, at_least=3.0, faster=True, shown=shown, tolerance=0.5, what=what, headline=headline)


def _measure(
    processes: Mapping[str, subprocess.Popen[str]], measured: Mapping[str, list[float]], turns: int, seconds: float
) -> None:
    """Add to each arm the median of what an update took in its turns."""
    took: dict[str, list[float]] = {arm: [] for arm in measured}
    for number in range(turns):
        for arm in list(measured)[:: 1 if number % 2 == 0 else -1]:
            ask, answer = processes[arm].stdin, processes[arm].stdout
            assert ask is not None
            assert answer is not None
            print(seconds, file=ask, flush=True)
            took[arm].append(float(answer.readline()))
    for arm, values in took.items():
        measured[arm].append(statistics.median(values))


@contextmanager
def _process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    env, pipes = {key: value for key, value in os.environ.items() if key not in OWN}, subprocess.PIPE
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, env=env, stdin=pipes, stdout=pipes, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
