"""``python -m tests.benchmarks.whole_command``: a training of 460 updates, from the command until the prompt is back.

One arm is the kit with all that a user gets by default (console, JSON lines, TensorBoard, W&B offline, checkpoints with
hashes, validation, a test at the end); the first is `arms/bare.py`, alone or under torchrun. Peers join where there is
a python that has them. Before anything is timed, both make the same 40 updates from the same weights and batches, and
must have the same losses. Wall time of the whole command and of its training steps, and rank 0's largest memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.benchmarks.measuring import CONTROL, Figure, against, ratios, take_turns
from trainkit.config.loading import load
from trainkit.data import build_data
from trainkit.data.order import global_batch
from trainkit.models import build_model

PROJECT = Path(__file__).resolve().parents[2]
ARMS = Path(__file__).parent / "arms"
STEPS, ROUNDS, SAME = 460, 3, 40
SETTINGS = ("train.precision=fp32", "schedule.name=constant", "schedule.warmup_epochs=0", "optim.weight_decay=0")


def measure(peers: str | None = None) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not do the same.
    """
    figures = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for ranks in (1, 2):
            same_losses(folder, ranks)
            figures += _of(folder, ranks, peers)
    help_seconds = statistics.median(_help() for _ in range(7))
    figures.append(Figure("`submit --help`", f"{help_seconds:.2f} s", "at most 0.2 s", help_seconds <= 0.2))
    return figures


def _of(folder: Path, ranks: int, peers: str | None) -> list[Figure]:
    inner: dict[str, list[tuple[float, float]]] = {}

    def timed(name: str, run: Callable[[], tuple[float, float]]) -> float:
        began = time.perf_counter()
        facts = run()
        seconds = time.perf_counter() - began
        inner.setdefault(name, []).append(facts)
        return seconds

    script = partial(bare, folder, ranks)
    arms = {"bare": partial(timed, "bare", script), "kit": partial(timed, "kit", partial(kit, folder, ranks))}
    if peers is not None:
        for name in ("accelerate", "lightning"):
            arms[name] = partial(timed, name, partial(peer, folder, ranks, peers, name))
    for arm in arms.values():
        arm()  # files are in memory from here on
    inner.clear()
    measured = take_turns(arms, ROUNDS)
    training = {name: [facts[0] for facts in values] for name, values in inner.items()}
    twice = training.pop("bare")  # a round has two of them, the control in the middle of every other pair
    steps = {"bare": twice[::2], **training, CONTROL: twice[1::2]}
    memory = [statistics.median(facts[1] for facts in inner[name]) for name in ("kit", "bare")]
    where = f"{ranks} rank{'s' * (ranks > 1)}"
    figures = [
        against(measured, "kit", what=f"command to end, {where}, to bare", goal=1.0),
        against(steps, "kit", what=f"training steps, {where}, own data path, to bare", goal=0.9),
        Figure(
            f"largest memory of rank 0, {where}, to bare",
            f"{memory[0] / memory[1]:.3f}; {memory[0]:.0f} to {memory[1]:.0f} MiB",
            "at most 1.05",
            memory[0] <= 1.05 * memory[1],
        ),
    ]
    for name in arms:
        if name not in ("bare", "kit"):
            ratio = statistics.median(ratios(measured, name))
            figures.append(Figure(f"the same for {name}, {where}", f"{ratio:.3f}", note="a peer"))
    return figures


def environment(folder: Path) -> dict[str, str]:
    """Of every arm."""
    none = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TRAINKIT_ATTEMPT")}
    more = {"TRAINKIT_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state"), "WANDB_MODE": "offline"}
    return none | more | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PROJECT)}


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, env=environment(folder), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def kit(folder: Path, ranks: int, *more: str, steps: int | None = None, name: str = "") -> tuple[float, float]:
    """Seconds in training steps and MiB, by its own summary."""
    run = folder / (name or f"kit-{time.monotonic_ns()}")
    settings = [*SETTINGS, f"train.max_steps={steps or STEPS}", *more]
    command = ["jobs.train", "single"] if ranks == 1 else ["jobs.submit", "ddp", "--executor", "local", "--wait"]
    if ranks > 1:
        command += ["--again", "--ntasks-per-node", str(ranks), "--gpus-per-node", "0"]
    _run([sys.executable, "-m", *command, "--run-dir", str(run), *settings], folder)
    summary = json.loads((run / "summary.json").read_text())
    return summary["train_seconds"], summary["max_memory_mb"]


def _launched(python: str, script: str, ranks: int) -> list[str]:
    alone = [python, str(ARMS / script)]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), alone[1]]
    return alone if ranks == 1 else torchrun


def bare(folder: Path, ranks: int, *more: str, steps: int | None = None) -> tuple[float, float]:
    """Seconds in training steps and MiB, as it has measured them."""
    out = folder / "bare.json"
    _run([*_launched(sys.executable, "bare.py", ranks), str(steps or STEPS), str(out), *more], folder)
    facts = json.loads(out.read_text())
    return facts["train_seconds"], facts["rss_mb"]


def peer(folder: Path, ranks: int, python: str, name: str) -> tuple[float, float]:
    """The same, of Lightning or accelerate."""
    out, script = folder / f"{name}-{time.monotonic_ns()}.json", f"with_{name}.py"
    command = _launched(python, script, ranks)
    if name == "lightning":
        _run([python, str(ARMS / script), str(STEPS), str(out), str(ranks)], folder)
    else:
        _run([*command, str(STEPS), str(out)], folder)
    facts = json.loads(out.read_text())
    return facts["train_seconds"], facts["rss_mb"]


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
