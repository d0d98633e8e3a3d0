"""A training of 460 updates, from the command until the prompt is back.

One arm is the kit with all that a user gets by default (console, JSON lines, TensorBoard, W&B offline, checkpoints with
hashes, validation, a test at the end); the first is `arms/bare.py`, alone or under torchrun.
Before anything is timed, both make the same 40 updates from the same weights and batches, and must have the same
losses; that also brings all files into memory.

Measured are the whole command, its training steps, what lies before and after them, the CPU time of all its processes,
and memory: of a rank, which is the largest process (peak RSS), and of all of them at one time (peak PSS: a rank is a
fork of its keeper, and shares most of what both have).
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.benchmarks.measuring import CONTROL, Figure, against, describe, take_turns, wall_seconds
from tests.benchmarks.processes import PROJECT, Ran, environment, ran
from trainkit.config.loading import load
from trainkit.data.order import global_batch
from trainkit.data.registry import build_data
from trainkit.models.library import build_model

BARE = Path(__file__).parent / "arms" / "bare.py"
STEPS, ROUNDS, SAME = 460, 9, 40
_SHARED = {
    1: "",
    2: "0.81 of bare's CPU time in these are the model's passes and the exchange of gradients, which both have; "
    "the kit's 25 checkpoints are written behind its updates, bare's between them",
}
"""Why the training steps can hardly be quicker, by the number of ranks."""
_ABORTED_AT_EXIT = "terminate called without an active exception"
"""By torch 2.x with gloo, of a plain script's rank whose work was done: about 1 in 15 starts of two ranks."""
SETTINGS = ("train.precision=fp32", "schedule.name=constant", "schedule.warmup_epochs=0", "optim.weight_decay=0")

Measured = dict[str, float]
"""Of one command: seconds, training, before, after, cpu; largest and together in MiB."""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not do the same.
    """
    figures = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for ranks in (1, 2):
            same_losses(folder, ranks)
            figures += _of(folder, ranks, rounds)
    asks = partial(subprocess.run, [sys.executable, "-m", "jobs.submit", "--help"], cwd=PROJECT, capture_output=True)
    times = [wall_seconds(asks) for _ in range(7)]
    met, shown = statistics.median(times) <= 0.2, describe(times, "{:.2f} s".format)
    return [*figures, Figure("`submit --help`", shown, goal="at most 0.20 s", met=met)]


def _of(folder: Path, ranks: int, rounds: int) -> list[Figure]:
    where = f"{ranks} rank{'s' * (ranks > 1)}"
    commands: dict[str, list[Measured]] = {"bare": [], "kit": []}

    def timed(name: str, run: Callable[[], Measured]) -> float:
        measured = run()
        commands[name].append(measured)
        shown = ", ".join(f"{key} {value:.2f}" for key, value in measured.items())
        print(f"{name}, {where}: {shown}", file=sys.stderr, flush=True)
        return measured["seconds"]

    arms = {"bare": partial(bare, folder, ranks), "kit": partial(kit, folder, ranks)}
    take_turns({name: partial(timed, name, run) for name, run in arms.items()}, rounds)

    def of(key: str, what: str, **more: Any) -> Figure:
        twice = [one[key] for one in commands["bare"]]  # a round has two, the control at its end or its beginning
        values = {"bare": twice[::2], "kit": [one[key] for one in commands["kit"]], CONTROL: twice[1::2]}
        return against(values, "kit", what=f"{what}, {where}, to bare", **more)

    headline = f"from the command to its end, {where}, to bare" if ranks == 2 else ""
    size = {"shown": "{:.0f} MiB".format}
    return [
        of("seconds", "from the command to its end", at_most=1.0, headline=headline),
        of("before", "from the command to its first batch"),
        of("after", "from the last update to the prompt"),
        of("cpu", "CPU time of all processes of the command"),
        of("training", "training steps alone, own data path", at_most=0.9, note=_SHARED[ranks]),
        of("largest", "memory of a rank", at_most=1.05, **size),
        of("together", "memory of all processes, each page once", at_most=1.1, **size),
    ]


def _measured(command: Ran, training: float, first: float, last: float) -> Measured:
    """``first``, ``last``: when the first batch was asked for, and when the last update was made, since 1970."""
    return {
        "seconds": command.seconds, "training": training, "before": first - command.began,
        "after": command.began + command.seconds - last, "cpu": command.cpu, "largest": command.largest,
        "together": command.together,
    }  # fmt: skip


def kit(folder: Path, ranks: int, *more: str, steps: int = STEPS, name: str = "") -> Measured:
    """By its own records."""
    run = folder / (name or f"kit-{time.monotonic_ns()}")
    command = ["jobs.train", "single"] if ranks == 1 else ["jobs.submit", "ddp", "--executor", "local", "--wait"]
    if ranks > 1:
        command += ["--again", "--ntasks-per-node", str(ranks), "--gpus-per-node", "0"]
    words = [sys.executable, "-m", *command, "--run-dir", str(run), *SETTINGS, f"train.max_steps={steps}", *more]
    command_ran = ran(words, environment(folder), folder)
    started = next(event for event in _lines(run / "events.jsonl") if event["event"] == "started")
    last = max(record["time"] for record in _lines(run / "metrics.jsonl") if record["split"] == "train")
    training = json.loads((run / "summary.json").read_text())["train_seconds"]
    return _measured(command_ran, training, started["time"], last)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def bare(folder: Path, ranks: int, *more: str, steps: int = STEPS) -> Measured:
    """`arms/bare.py`, by hand or under torchrun."""
    out = folder / "bare.json"
    words = [str(BARE), str(steps), str(out), *more]
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]
    try:
        command = ran([sys.executable, *words], environment(folder), folder)
    except AssertionError as error:
        if _ABORTED_AT_EXIT not in str(error):
            raise
        print("bare: torch aborted a rank that had ended; once more", file=sys.stderr, flush=True)
        command = ran([sys.executable, *words], environment(folder), folder)
    told = json.loads(out.read_text())
    return _measured(command, told["train_seconds"], told["first"], told["last"])


def same_losses(folder: Path, ranks: int) -> None:
    """Both arms, with the same weights and batches, have the same losses.

    Raises AssertionError if they have not.
    """
    settings = (*SETTINGS, "data.augment=false", "monitor.log_every=1")
    config = load("single", settings).config
    splits = build_data(config.data)
    images, labels = zip(*(splits.train[index] for index in range(len(splits.train))), strict=True)
    given = {
        "images": torch.stack(images), "labels": torch.tensor(labels),
        "batches": [global_batch(splits.train, config.seed, step, 64) for step in range(SAME)],
        "weights": build_model(config.model, splits.info, config.seed).state_dict(),
    }  # fmt: skip
    torch.save(given, folder / "same.pt")
    bare(folder, ranks, str(folder / "same.pt"), steps=SAME)
    theirs = json.loads((folder / "bare.json").read_text())["losses"]
    kit(folder, ranks, *settings, steps=SAME, name=f"same-{ranks}")
    records = _lines(folder / f"same-{ranks}" / "metrics.jsonl")
    ours = [record["loss"] for record in records if record["split"] == "train"]
    assert len(ours) == len(theirs) == SAME
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    assert worst < 1e-4, f"the losses differ by {worst:.1e}"
