import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainkit import fileio
from trainkit.config.loading import load, to_yaml
from trainkit.run.folder import RunDir
from trainkit.swarm.address import EXAMPLE


@pytest.mark.swarm
def test_a_swarm_that_does_not_answer_is_shown_from_its_records(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "hivemind-0001", to_yaml(load("hivemind").config))
    (run.path / "swarm_address").write_text(EXAMPLE.replace("203.0.113.7", "127.0.0.1") + "\n", encoding="utf-8")
    where = {"time": time.time(), "step": 10, "epoch": 0.5, "round": 1}
    fileio.append_jsonl(run.metrics, {**where, "split": "train", "loss": 1.5, "peers": 3})
    fileio.append_jsonl(run.metrics, {**where, "split": "val", "loss": 1.25, "acc1": 61.5})
    # Not in this process: hivemind starts threads and processes that do not belong into the test's own.
    code = (
        "import sys, runpy; sys.argv = ['swarm', 'status']\n"
        "try: runpy.run_module('jobs.swarm', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'hivemind') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TRAINKIT_RUNS": str(run.path.parent)}
    asking = [sys.executable, "-c", code]
    done = subprocess.run(asking, capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert done.stdout.splitlines() == [
        "hivemind-0001: not running, round 1/15, 0 peers, loss 1.5000, val acc1 61.50 %",
        "0 ['hivemind']",  # in a second: without torch
    ]
