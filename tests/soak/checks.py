"""What must hold of a run, whatever has happened to it."""

import json
import time
from collections.abc import Iterator
from typing import Any

from tests.soak.cluster import Cluster
from trainkit.checkpoint import format
from trainkit.checkpoint.format import BrokenCheckpointError
from trainkit.common import jsonl
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

EVERY_STEPS = 10
"""Updates between two checkpoints."""
BUDGETS = ("attempts have failed", "restarts have not come to a new checkpoint")
"""Words with which a run ends that is not started again by itself."""
_MEASURED = ("time", "images_per_sec", "max_memory_mb")
"""What differs from one start to the next."""
_GONE_SECONDS = 30


def faults(run: RunDir, whole: RunDir, steps: int) -> Iterator[str]:
    """Where a run that has ended differs from ``whole``, which nobody has interrupted."""
    if len(whole.attempts()) > 1:
        yield f"the other run was interrupted itself: {len(whole.attempts())} attempts"
    for file in sorted({path.name for each in (run, whole) for path in each.checkpoints.glob("latest/*.safetensors")}):
        if _latest(run, file) != _latest(whole, file):
            yield f"{file} is not that of an uninterrupted run"
    if _progress(run) != _progress(whole):
        yield f"its progress is {_progress(run)} instead of {_progress(whole)}"
    if json.loads(run.summary.read_text())["outcome"] != "finished":
        yield "its summary does not say that it has finished"
    if (endings := [event.get("state") for event in read_events(run, "ended")].count("COMPLETED")) != 1:
        yield f"it was completed {endings} times"
    yield from _of_metrics(run, whole, steps)
    yield from _of_repeats(run)
    yield from _of_resumes(run)
    yield from broken_checkpoints(run)


def gaps(run: RunDir, steps: int | None = None) -> Iterator[str]:
    """Steps without a record for a reader, or with two, up to ``steps`` or the furthest."""
    told = [record["step"] for record in read_metrics(run, "train")]
    wanted = range(1, (steps or max(told, default=0)) + 1)
    if told != list(wanted):
        missing = sorted(set(wanted) - set(told))
        yield f"for a reader there are {len(told)} steps of {len(wanted)}; missing: {missing[:20]}"


def _of_metrics(run: RunDir, whole: RunDir, steps: int) -> Iterator[str]:
    yield from gaps(run, steps)
    for split in ("train", "val", "test"):
        mine, other = ([_computed(record) for record in read_metrics(each, split)] for each in (run, whole))
        if mine != other:
            wrong = [(one, two) for one, two in zip(mine, other, strict=False) if one != two][:2]
            yield f"the {split} metrics differ, {len(mine)} from {len(other)}: {wrong}"


def _of_repeats(run: RunDir) -> Iterator[str]:
    """At most two checkpoint intervals are done twice at each start: one checkpoint may have been on its way."""
    furthest = 0
    for record in jsonl.read_jsonl(run.metrics):
        if record.get("split") == "train":
            again = furthest - int(record["step"]) + 1
            if again > 2 * EVERY_STEPS:
                yield f"{again} updates were done twice from step {record['step']} on"
            furthest = max(furthest, int(record["step"]))


def _of_resumes(run: RunDir) -> Iterator[str]:
    """What was saved is where the next attempt goes on."""
    saved = 0
    for event in read_events(run, ("saved", "started")):
        if event["event"] == "started" and event["step"] < saved:
            yield f"attempt {event['attempt']} has started at step {event['step']} though {saved} was saved"
        saved = max(saved, event["step"])


def broken_checkpoints(run: RunDir) -> Iterator[str]:
    """Checkpoints that a reader would take, and that are not whole. One may be deleted while it is looked at."""
    for step in format.steps(run.checkpoints):
        try:
            format.verified(run.checkpoints, step)
        except BrokenCheckpointError as fault:
            if step in format.steps(run.checkpoints):
                yield f"the checkpoint of step {step} counts as whole: {fault}"


def left_behind(run: RunDir, cluster: Cluster) -> Iterator[str]:
    """Processes on the nodes, and files of writers that were killed, once all is over."""
    deadline = time.monotonic() + _GONE_SECONDS
    while (found := list(cluster.processes())) and time.monotonic() < deadline:
        time.sleep(1)
    for process in found:
        yield f"process {process.pid} is left on {process.node}: {process.command[:100]}"
    for pattern in ("checkpoints/.*", ".lease*", "lease.json", ".*.partial"):
        yield from (f"{path.relative_to(run.path)} is left" for path in run.path.glob(pattern))


def _latest(run: RunDir, file: str) -> bytes:
    path = run.checkpoints / "latest" / file
    return path.read_bytes() if path.exists() else b""


def _progress(run: RunDir) -> dict[str, Any]:
    state = json.loads(_latest(run, "state.json"))["state"]
    return {key: value for key, value in state["progress"].items() if key not in ("train_seconds", "seconds")}


def _computed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in _MEASURED and not key.startswith("seconds_")}
