import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from trainkit.common import jsonl
from trainkit.config.loading import load, to_yaml
from trainkit.report.document import Part, ReportRow, Table
from trainkit.run.folder import RunDir

MakeRun = Callable[..., RunDir]


def rows_of(parts: Iterable[Part]) -> list[ReportRow]:
    """The rows of all tables among the parts of a section."""
    return [row for part in parts if isinstance(part, Table) for row in part.rows]


def write_sweep_of(folder: Path, *points: Iterable[str]) -> None:
    """The ``sweep.json`` of runs 0, 1, ... with these overrides."""
    told = [{"run": str(number), "overrides": list(overrides)} for number, overrides in enumerate(points)]
    (folder / "sweep.json").write_text(json.dumps(told))


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Write the folder of a run of 400 steps in 20 epochs, by the project's own functions."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(name: str = "ddp-0001", *overrides: str, **what: Any) -> RunDir:
        return write_run(tmp_path / "runs" / name, *overrides, **what)

    return make


def write_run(
    path: Path,
    *overrides: str,
    preset: str = "ddp",
    ranks: int = 2,
    speed: float = 2000.0,
    steps: int = 400,
    gpus: int = 0,
    finished: bool = True,
    restarts: tuple[int, ...] = (),
    told: dict[str, Any] | None = None,
    taken: float = 4.0,
) -> RunDir:
    run_dir = RunDir.create(path, to_yaml(load(preset, overrides).config))
    started = {
        "world_size": ranks, "total_steps": 400, "steps_per_epoch": 20, "hosts": ["node1"], "device": "cpu",
        "precision": "fp32", "params": 65834, "threads": 1, "cpus": 8, **(told or {}),
    }  # fmt: skip
    clock = 1.7e9
    for attempt, step in enumerate((0, *restarts)):
        run_dir.attempt_logs(attempt).mkdir()
        if attempt:
            jsonl.append_jsonl(run_dir.events, {"time": clock, "event": "requeued"})
        event = {"time": clock, "event": "started", "attempt": attempt, "step": step, **started}
        jsonl.append_jsonl(run_dir.events, event)
    for step in range(10, steps + 1, 10):
        clock += 640 / speed
        fit = math.exp(-step / 80)
        where = {"time": clock, "step": step, "epoch": step / 20}
        train = {"loss": 2.3 * fit + 0.03, "acc1": 99.9 - 89 * fit, "acc5": 100.0, "lr": 2e-3 * (1 - step / 401)}
        jsonl.append_jsonl(run_dir.metrics, {**where, "split": "train", **train, "images_per_sec": speed + step % 30})
        if step % 20 == 0:
            val = {"loss": 2.2 * fit + 0.05, "acc1": 99.3 - 88 * fit, "acc5": 100.0, "images_per_sec": speed}
            jsonl.append_jsonl(run_dir.metrics, {**where, "split": "val", **val})
        sample: dict[str, Any] = {"time": clock, "cpu_percent": 80.0 + step % 20, "memory_used_mb": 4096.0}
        sample |= {"memory_total_mb": 16384.0, "load": taken / 10, "cpu_taken": taken}
        if gpus:
            sample["gpus"] = [
                {"index": index, "util_percent": 90 + index + step % 5, "memory_used_mb": 9000.0 + 500 * index,
                 "memory_total_mb": 16384.0, "power_w": 65.0}
                for index in range(gpus)
            ]  # fmt: skip
        jsonl.append_jsonl(run_dir.hardware("node1"), sample)
    if finished:
        test = {"loss": 0.06, "acc1": 98.9, "acc5": 100.0}
        record = {"time": clock, "step": steps, "epoch": steps / 20, "split": "test", **test}
        jsonl.append_jsonl(run_dir.metrics, record)
        summary = {
            "outcome": "finished", "steps": steps, "best_step": steps, "test": test, "world_size": ranks,
            "train_seconds": 64 * steps / speed, "micro_batch_size": 64 // ranks, "grad_accum_steps": 1,
            "max_memory_mb": 812.4,
        }  # fmt: skip
        run_dir.summary.write_text(json.dumps(summary))
        run_dir.mistakes("val").write_text(json.dumps({"split": "val", "step": steps, "images": []}))
        jsonl.append_jsonl(run_dir.events, {"time": clock + 1, "event": "ended", "state": "COMPLETED"})
    return run_dir
