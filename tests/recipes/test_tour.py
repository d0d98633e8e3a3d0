"""The tour of a machine with several GPUs, executed as in Jupyter: by a kernel of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.student import PROJECT
from tests.swarm.test_notebook import EXECUTE
from trainkit.report.facts import Facts
from trainkit.run.folder import RunDir

NOTEBOOK = PROJECT / "jobs" / "notebooks" / "tour.ipynb"


def executed(notebook: Path, home: Path) -> dict[str, list[dict[str, Any]]]:
    """Execute a notebook in the folder ``home``; return the outputs of each cell."""
    own = {"PYTHONPATH": str(PROJECT), "IPYTHONDIR": str(home / ".ipython"), "OMP_NUM_THREADS": "1"}
    own |= {"PATH": str(Path(sys.executable).parent), "CUDA_VISIBLE_DEVICES": "", "TRAINKIT_RUNS": "runs"}
    words = [sys.executable, "-c", EXECUTE, str(notebook), str(home / "done.ipynb")]
    done = subprocess.run(words, cwd=home, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads((home / "done.ipynb").read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: cell["outputs"] for cell in cells if cell["cell_type"] == "code"}


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.long
def test_the_tour_trains_by_dp_and_ddp_plots_and_shows_the_report(tmp_path: Path) -> None:
    shown = executed(NOTEBOOK, tmp_path)
    runs = [Facts(RunDir.open(tmp_path / "runs" / f"ddp-000{number}"), "") for number in (1, 2, 3)]
    assert [run.setting("strategy.name") for run in runs] == ["single", "dp", "ddp"]
    assert [run.started("world_size") for run in runs] == [1, 1, 2]
    assert all(run.finished for run in runs)
    assert any("image/svg+xml" in item.get("data", {}) for item in shown["train"])
    said = "".join("".join(item.get("text", "")) for item in shown["results"])
    assert [f"{run.best_val['acc1']:.2f} %" in said for run in runs if run.best_val] == [True] * 3
    (table,) = ("".join(item["data"]["text/markdown"]) for item in shown["report"] if "data" in item)
    assert "speed-up" in table
    assert "ddp-0003" in table
    (page,) = ("".join(item["data"]["text/html"]) for item in shown["page"])
    assert "&lt;!doctype html&gt;" in page.lower()
