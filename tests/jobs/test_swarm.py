from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit import fileio
from trainkit.config.loading import load, to_yaml
from trainkit.run.folder import RunDir
from trainkit.swarm.address import EXAMPLE

Command = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("create", "hivemnd"), "Unknown preset 'hivemnd'."),
        (("create", "ddp"), "strategy.name=ddp is no collaborative run."),
        (("create", "hivemind", "collaborative.round_seconds=2"), "collaborative.round_seconds=2 leaves no time"),
        (("create", "hivemind", "--port", "70000"), "--port 70000 does not exist."),
        (("create", "hivemind", "--name", ""), "--name is too long or empty."),
        (("create", "hivemind", "collaborative.initial_peers=[x]"), "collaborative.initial_peers is set"),
        (("create", "hivemind", "--force"), "--force needs --resume: a new swarm runs nowhere else"),
        (("creat", "hivemind"), "'creat' is not possible."),
        *(
            (("invite", "anna", "--expires", time), f"--expires {time} is no time.")
            for time in ("0d", "367d", "7", "7y")
        ),
        (("status",), "No swarm in"),
        (("status", "nonsense"), "No run 'nonsense'."),
        (("status", "ddp-0001"), "ddp-0001 is not a swarm."),
        (("status", "/ip4/1.2.3.4/tcp/1/p2p/Qm"), "'/ip4/1.2.3.4/tcp/1/p2p/Qm' is not the address of a peer."),
    ],
)
def test_what_is_wrong_is_said_at_once_and_nothing_is_written(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    done = command("swarm", *arguments)
    assert done.code == 2
    assert done.err.startswith(says)
    assert [run.name for run in (tmp_path / "runs").glob("[!.]*")] == ["ddp-0001"]


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
        "  round  peers  train loss  val loss  val acc1",
        "  1      3      1.5000      1.2500    61.50",
        "0 ['hivemind']",  # in a second: without torch
    ]
