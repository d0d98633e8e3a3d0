"""``python -m tests.benchmarks.whole_command``: a training of 460 updates, from the command until the prompt is back.

One arm is the kit with all that a user gets by default (console, JSON lines, TensorBoard, W&B offline, checkpoints with
hashes, validation, a test at the end); the first is `arms/bare.py`, alone or under torchrun. Peers join where there is
a python that has them. Before anything is timed, both make the same 40 updates from the same weights and batches, and
must have the same losses. Wall time of the whole command and of its training steps; and memory: the most that each
process of the command had (VmHWM, looked at 5 times a second), of the largest one, which is a rank, and of all of them
in sum, where pages that several share count in each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from tests.benchmarks.measuring import CONTROL, Figure, against, alone, take_turns
from trainkit.config.loading import load
from trainkit.data import build_data
from trainkit.data.order import global_batch
from trainkit.models import build_model

PROJECT = Path(__file__).resolve().parents[2]
ARMS = Path(__file__).parent / "arms"
STEPS, ROUNDS, SAME = 460, 3, 40
LOOK_SECONDS = 0.2
SETTINGS = ("train.precision=fp32", "schedule.name=constant", "schedule.warmup_epochs=0", "optim.weight_decay=0")


def measure(rounds: int = ROUNDS, peers: str | None = None) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not do the same.
    """
    figures = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for ranks in (1, 2):
            same_losses(folder, ranks)
            figures += _of(folder, ranks, rounds, peers)
    figures.append(alone([_help() for _ in range(7)], what="`submit --help`", shown="{:.2f} s".format, at_most=0.2))
    return figures


def _of(folder: Path, ranks: int, rounds: int, peers: str | None) -> list[Figure]:
    inner: dict[str, list[_Ran]] = {}

    def timed(name: str, run: Callable[[], _Ran]) -> float:
        inner.setdefault(name, []).append(run())
        return inner[name][-1].seconds

    arms = {"bare": partial(timed, "bare", partial(bare, folder, ranks))}
    arms["kit"] = partial(timed, "kit", partial(kit, folder, ranks))
    if peers is not None:
        for name in ("accelerate", "lightning"):
            arms[name] = partial(timed, name, partial(peer, folder, ranks, peers, name))
    for arm in arms.values():
        arm()  # files are in memory from here on
    inner.clear()
    measured = take_turns(arms, rounds)

    def inside(of: Callable[[_Ran], float]) -> dict[str, list[float]]:
        values = {name: [of(ran) for ran in found] for name, found in inner.items()}
        twice = values["bare"]  # a round has two of them, the control at its end or its beginning
        return {**values, "bare": twice[::2], CONTROL: twice[1::2]}

    steps, largest, in_sum = (
        inside(lambda ran: ran.training),
        inside(lambda ran: ran.largest),
        inside(lambda ran: ran.sum),
    )
    where, size = f"{ranks} rank{'s' * (ranks > 1)}", "{:.0f} MiB".format
    what = f"from the command to its end, {where}, to bare"
    figures = [
        against(measured, "kit", what=what, at_most=1.0, headline=what if ranks == 2 else ""),
        against(steps, "kit", what=f"training steps alone, {where}, own data path, to bare", at_most=0.9),
        against(largest, "kit", what=f"memory of the largest process, {where}, to bare", at_most=1.05, shown=size),
        against(in_sum, "kit", what=f"memory of all processes in sum, {where}, to bare", shown=size),
    ]
    for name in arms:
        if name not in ("bare", "kit"):
            figures += [
                against(measured, name, what=f"{name}: command to its end, {where}, to bare"),
                against(steps, name, what=f"{name}: training steps alone, {where}, to bare"),
                against(largest, name, what=f"{name}: memory of the largest process, {where}, to bare", shown=size),
            ]
    return figures


def environment(folder: Path) -> dict[str, str]:
    """Of every arm."""
    none = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TRAINKIT_ATTEMPT")}
    more = {"TRAINKIT_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state"), "WANDB_MODE": "offline"}
    return none | more | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PROJECT)}


@dataclass(frozen=True)
class _Ran:
    """A command: wall seconds in all and in training steps, MiB of its largest process and of all in sum."""

    seconds: float
    training: float
    largest: float
    sum: float


def _run(command: Sequence[str], folder: Path, facts: Path) -> _Ran:
    """Run it to its end; ``facts`` is what it then has written about its training."""
    most: dict[int, int] = {}
    with (folder / "output").open("w+b") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=environment(folder), cwd=folder, stdout=output, stderr=output)
        ours = psutil.Process(process.pid)
        while True:
            for pid in _pids(ours):
                most[pid] = _high_water(pid) or most.get(pid, 0)
            try:
                process.wait(timeout=LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        seconds = time.perf_counter() - began
        output.seek(0)
        assert process.returncode == 0, f"{' '.join(command)}\n{output.read().decode()[-6000:]}"
    training = json.loads(facts.read_text())["train_seconds"]
    return _Ran(seconds, training, max(most.values()) / 1024, sum(most.values()) / 1024)


def _pids(process: psutil.Process) -> list[int]:
    try:
        return [process.pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


def _high_water(pid: int) -> int:
    """The most KiB that a process had in memory; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def kit(folder: Path, ranks: int, *more: str, steps: int | None = None, name: str = "") -> _Ran:
    """By its own summary."""
    run = folder / (name or f"kit-{time.monotonic_ns()}")
    settings = [*SETTINGS, f"train.max_steps={steps or STEPS}", *more]
    command = ["jobs.train", "single"] if ranks == 1 else ["jobs.submit", "ddp", "--executor", "local", "--wait"]
    if ranks > 1:
        command += ["--again", "--ntasks-per-node", str(ranks), "--gpus-per-node", "0"]
    return _run([sys.executable, "-m", *command, "--run-dir", str(run), *settings], folder, run / "summary.json")


def _launched(python: str, script: str, ranks: int) -> list[str]:
    alone = [python, str(ARMS / script)]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), alone[1]]
    return alone if ranks == 1 else torchrun


def bare(folder: Path, ranks: int, *more: str, steps: int | None = None) -> _Ran:
    """By hand, or under torchrun."""
    out = folder / "bare.json"
    return _run([*_launched(sys.executable, "bare.py", ranks), str(steps or STEPS), str(out), *more], folder, out)


def peer(folder: Path, ranks: int, python: str, name: str) -> _Ran:
    """The same, of Lightning, which starts its ranks itself, or of accelerate."""
    out, script = folder / f"{name}-{time.monotonic_ns()}.json", f"with_{name}.py"
    if name == "lightning":
        return _run([python, str(ARMS / script), str(STEPS), str(out), str(ranks)], folder, out)
    return _run([*_launched(python, script, ranks), str(STEPS), str(out)], folder, out)


def same_losses(folder: Path, ranks: int) -> None:
    """Both arms, with the same weights and batches, have the same losses.

    Raises AssertionError if they have not.
    """
    settings = (*SETTINGS, "data.augment=false", "monitor.log_every=1", "monitor.loggers=[jsonl]")
    config = load("single", settings).config
    splits = build_data(config.data)
    batches = [global_batch(len(splits.train), config.seed, step, 64) for step in range(SAME)]
    given = {
        "images": torch.stack([splits.train[index][0] for index in range(len(splits.train))]),
        "labels": torch.tensor([splits.train[index][1] for index in range(len(splits.train))]),
        "batches": batches,
        "weights": build_model(config.model, splits.info, config.seed).state_dict(),
    }
    torch.save(given, folder / "same.pt")
    bare(folder, ranks, str(folder / "same.pt"), steps=SAME)
    theirs = json.loads((folder / "bare.json").read_text())["losses"]
    kit(folder, ranks, *settings, steps=SAME, name=f"same-{ranks}")
    records = [json.loads(line) for line in (folder / f"same-{ranks}" / "metrics.jsonl").read_text().splitlines()]
    ours = [record["loss"] for record in records if record["split"] == "train"]
    assert len(ours) == len(theirs) == SAME
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    assert worst < 1e-4, f"the losses differ by {worst:.1e}"


def _help() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "jobs.submit", "--help"], cwd=PROJECT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "whole_command", *sys.argv[1:]]))
