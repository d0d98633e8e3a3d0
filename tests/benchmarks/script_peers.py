"""One training script, in the words of accelerate, Lightning Fabric and trainkit, beside the bare one.

`arms/script_bare.py` trains a ResNet-18 on one device; the other arms are that file with the lines changed that each
library asks for, all in fp32; `arms/script_saved.py` is trainkit's with what the others do not have. It needs both:
``pip install accelerate lightning``.

- Lines: those of an arm that the bare script has not, indentation aside.
- Seconds of an update: one process each, one thread, which take turns; the losses of their first updates are the same.
- From the command to its end: two ranks, as many updates, by `accelerate launch` and by `jobs.submit`, which also
  keeps the run: code, records, checkpoints.
- Updates lost: the arm of trainkit is killed by SIGKILL in the middle of an epoch, and goes on. The others save
  nothing, so that they lose all.
"""

import ast
import difflib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.arms.script_hooks import SAMPLES, TIMED
from tests.benchmarks.measuring import Figure, against, take_turns
from tests.benchmarks.processes import environment, ran

ROUNDS = 25
COMMANDS = 3
"""Rounds of whole commands."""
ARMS = Path(__file__).parent / "arms"
PEERS = ("accelerate", "fabric", "trainkit", "saved")
COMMAND_EPOCHS, EPOCHS, BATCH = 1, 2, 32
KILLED_AFTER = 50
"""Updates; an epoch has 30."""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not make the same updates.
    """
    missing = [name for name in ("accelerate", "lightning") if importlib.util.find_spec(name) is None]
    if missing:
        return [Figure("a script beside its peers", "", note=f"not measured: {' and '.join(missing)} not installed")]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        return [lines(), *updates(folder, rounds), whole_command(folder, min(rounds, COMMANDS)), lost(folder)]


def script(name: str) -> Path:
    return ARMS / f"script_{name}.py"


def lines() -> Figure:
    counts = {name: len(changed(name)) for name in PEERS}
    words = ", ".join(f"{name} {count}" for name, count in counts.items())
    met = counts["trainkit"] < counts["accelerate"]
    note = "saved: trainkit's with saving, going on and records, which the others do not have"
    return Figure("lines changed in the bare script", words, goal="fewer than accelerate's", met=met, note=note)


def changed(name: str) -> list[str]:
    """Lines of an arm that the bare script has not, but for its docstring."""
    return [line for line in difflib.ndiff(body("bare"), body(name)) if line.startswith("+ ") and line[2:]]


def body(name: str) -> list[str]:
    """Lines of an arm behind its docstring, without their indentation."""
    source = script(name).read_text()
    return [line.strip() for line in source.splitlines()[ast.parse(source).body[0].end_lineno :]]


# Updates


@contextmanager
def resident(name: str, folder: Path) -> Iterator[tuple[Callable[[], float], str]]:
    """An arm that waits for its turns: what gives it one and returns its seconds, and its first losses."""
    go = os.pipe()
    done = os.pipe()
    place = folder / f"arm-{name}"
    place.mkdir(exist_ok=True)
    env = environment(place) | {"SCRIPT_TURNS": f"{go[0]},{done[1]}", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script(name)), "100000", str(BATCH)]
    with (place / "output").open("w") as output:
        process = subprocess.Popen(
            words, env=env, cwd=place, stdout=output, stderr=output, pass_fds=(go[0], done[1]), start_new_session=True
        )
    os.close(go[0])
    os.close(done[1])
    with os.fdopen(done[0]) as told:
        losses = told.readline()
        assert losses, f"{name}: {(place / 'output').read_text()[-2000:]}"

        def turn() -> float:
            os.write(go[1], b"x")
            return float(told.readline()) / TIMED

        try:
            yield turn, losses
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(go[1])


def updates(folder: Path, rounds: int) -> list[Figure]:
    with (
        resident("bare", folder) as bare, resident("accelerate", folder) as accelerate,
        resident("fabric", folder) as fabric, resident("trainkit", folder) as trainkit,
        resident("saved", folder) as saved,
    ):  # fmt: skip
        arms = {"bare": bare, "accelerate": accelerate, "fabric": fabric, "trainkit": trainkit, "saved": saved}
        for name, (_, losses) in arms.items():
            same_losses(name, ast.literal_eval(losses), ast.literal_eval(bare[1]))
        taken = take_turns({name: turn for name, (turn, _) in arms.items()}, rounds)
    figures = []
    for name in PEERS:
        is_ours = name in ("trainkit", "saved")
        goal = 1.01 if is_ours else None
        theirs = statistics.median(ratio / one for ratio, one in zip(taken[name], taken["accelerate"], strict=True))
        note = f"to accelerate {theirs:.3f}, at most 1.000" if is_ours else ""
        what = f"an update of the ResNet script with {name}, to bare"
        figures.append(against(taken, name, what=what, at_most=goal, note=note, shown=lambda s: f"{1000 * s:.1f} ms"))
    return figures


def same_losses(name: str, losses: list[float], bare: list[float]) -> None:
    worst = max(abs(one - other) / other for one, other in zip(losses, bare, strict=True))
    assert worst < 1e-4, f"the losses of {name} differ by {worst:.1e}"


# Commands


def commands(folder: Path) -> dict[str, list[str]]:
    """What starts two ranks of an arm on this machine and returns when they have ended."""
    # With --cpu it starts one process, whatever --num_processes says (findings/accelerate_launch_cpu.sh).
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", str(script("accelerate")), str(COMMAND_EPOCHS)]
    submit = ["-m", "jobs.submit", str(script("saved")), "--executor", "local", "--wait", "--again"]
    submit += [
        "--ntasks-per-node",
        "2",
        "--run-dir",
        str(folder / f"run-{time.monotonic_ns()}"),
        "--",
        str(COMMAND_EPOCHS),
    ]
    return {"accelerate": [*launch, str(BATCH // 2)], "trainkit": [*submit, str(BATCH)]}


def whole_command(folder: Path, rounds: int) -> Figure:
    def timed(name: str) -> float:
        return ran([sys.executable, *commands(folder)[name]], env, folder).seconds

    env = environment(folder) | {"ACCELERATE_USE_CPU": "true"}
    for name in ("accelerate", "trainkit"):
        made = folder / f"made-{name}"
        ran([sys.executable, *commands(folder)[name]], env | {"SCRIPT_UPDATES": str(made)}, folder)
        count = len(made.read_text().splitlines())
        assert count == 2 * COMMAND_EPOCHS * SAMPLES // BATCH, f"{name} has made {count} updates on two ranks"
    taken = take_turns({name: partial(timed, name) for name in ("accelerate", "trainkit")}, rounds)
    what = "from the command to its end, 2 ranks of the script, to `accelerate launch`"
    return against(taken, "trainkit", what=what, at_most=0.9, headline=what)


def lost(folder: Path) -> Figure:
    """Updates that are made again after a SIGKILL, by the checkpoints of the default settings."""
    made = folder / "made"
    env = environment(folder) | {"SCRIPT_UPDATES": str(made)}
    words = [sys.executable, str(script("saved")), str(EPOCHS), str(BATCH)]
    process = subprocess.Popen(words, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and count_of(made) < KILLED_AFTER:
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = count_of(made)
    run = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    ran(words, env | {"TRAINKIT_CONTINUE": str(run)}, folder)
    again = count_of(made) - EPOCHS * SAMPLES // BATCH
    words_of = f"{again} of {before}; bare, accelerate and fabric, which save nothing: {before}"
    return Figure("updates lost by a SIGKILL of the script with trainkit, a checkpoint an epoch", words_of)


def count_of(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0
