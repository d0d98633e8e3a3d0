"""``python -m tests.benchmarks.busy_cores``: what waiting threads cost where cores are free, and where they are not.

The same updates with OpenMP's own way of waiting, and with ours (`trainkit.lifetime`), in one process on all cores: at
first alone, then beside four programs a core that never stop. Arms are processes that stay and take turns; what waits
for its turn reads a pipe. Whoever starts beside such a load notices it, and its threads do not wait awake at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from tests.benchmarks.measuring import Figure, against, take_turns

ROUNDS = 40
BUSY_ROUNDS = 9
TURN, BUSY_TURN = 0.5, 3.0
"""Seconds of a turn, or one update if that takes longer."""
LOAD = 4
"""Busy programs a core."""
MODELS = {"fashion_cnn": (64, 1, 8), "resnet18": (32, 3, 64)}
"""Images in a batch, their channels and side."""
OWN = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WAYS = {
    "OpenMP's own": "",
    "ours": "from trainkit import lifetime; lifetime.begin()",
    "ours, started beside the load": "from trainkit import lifetime; lifetime.begin(); lifetime.share_cores(busy=True)",
}
ARM = """
import sys
way, name, batch, channels, side = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
exec(way)
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
    batch = MODELS[name][0]
    with ExitStack() as held:
        arms = {way: held.enter_context(_arm(name, way)) for way in WAYS}
        losses = {way: arm.stdout.readline() for way, arm in arms.items() if arm.stdout}
        assert len(set(losses.values())) == 1, losses  # bit for bit
        free = {way: partial(_turn, arms[way], TURN) for way in list(WAYS)[:2]}
        measured = take_turns(free, rounds)
        what = (
            f"{name}, one process with all cores to itself: images/s of threads that wait for 0.2 ms, to OpenMP's own"
        )
        yield against(measured, "ours", what=what, at_least=0.97, faster=True, shown=_speed(batch))
        for _ in range(LOAD * len(os.sched_getaffinity(0))):
            held.enter_context(_process("while True: pass"))
        measured = take_turns({way: partial(_turn, arm, BUSY_TURN) for way, arm in arms.items()}, min(rounds, BUSY_ROUNDS))
    for way in list(WAYS)[1:]:
        # One update of the first arm takes as long as others leave it no core: the two turns of it are seldom alike.
        yield against(
            measured, way, what=f"{name}, beside {LOAD} busy programs a core: images/s of {way}, to OpenMP's own",
            at_least=4.0, faster=True, shown=_speed(batch), tolerance=1.0,
            headline=f"{name} on the CPU beside {LOAD} busy programs a core, to OpenMP's own way of waiting"
            if way.endswith("load") else "",
        )  # fmt: skip


@contextmanager
def _process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    env = {key: value for key, value in os.environ.items() if key not in OWN}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _arm(name: str, way: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return _process(ARM, WAYS[way], name, *map(str, MODELS[name]))


def _turn(arm: subprocess.Popen[str], seconds: float) -> float:
    """Seconds that an update takes."""
    assert arm.stdin is not None
    assert arm.stdout is not None
    print(seconds, file=arm.stdin, flush=True)
    return float(arm.stdout.readline())


def _speed(images: int) -> Callable[[float], str]:
    return lambda seconds: f"{images / seconds:,.0f} images/s"


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "busy_cores"]))
