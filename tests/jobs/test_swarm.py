import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from jobs.join import rate_of
from trainkit.common import jsonl
from trainkit.common.errors import UserError
from trainkit.config.loading import load, to_yaml
from trainkit.run.folder import RunDir
from trainkit.swarm.identity.invitations import Key
from trainkit.swarm.peer.owner import keep_key
from trainkit.swarm.protocol.addresses import EXAMPLE, MEGABIT


@pytest.mark.swarm
@pytest.mark.parametrize(("whose", "asks"), [("owner", ["torch", "hivemind"]), ("volunteer", [])])
def test_a_swarm_that_does_not_answer_is_shown_from_its_records(whose: str, asks: list[str], tmp_path: Path) -> None:
    """Of a swarm that was only joined here no token is kept: nobody would answer."""
    run = RunDir.create(tmp_path / "runs" / "hivemind-0001", to_yaml(load("hivemind").config))
    (run.path / "swarm_address").write_text(EXAMPLE.replace("203.0.113.7", "127.0.0.1") + "\n", encoding="utf-8")
    if whose == "owner":
        keep_key(run.path, Key(b"o" * 32))
    where = {"time": time.time(), "step": 10, "epoch": 0.5, "round": 1}
    jsonl.append_jsonl(run.metrics, {**where, "split": "train", "loss": 1.5, "peers": 3})
    jsonl.append_jsonl(run.metrics, {**where, "split": "val", "loss": 1.25, "acc1": 61.5})
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
        f"0 {asks}",
    ]


SPEEDS: dict[str, float | None] = {"20Mbit": 20.0, "500kbit": 0.5, "1Gbit/s": 1000.0, "2.5 mbit": 2.5}
SPEEDS |= dict.fromkeys(["20", "20MB", "fast", "0Mbit", "-1Mbit", "9" * 400 + "Mbit"])


@pytest.mark.parametrize(("text", "megabits"), SPEEDS.items())
def test_a_speed_is_written_as_on_the_contract_or_refused_with_an_example(text: str, megabits: float | None) -> None:
    refused = pytest.raises(UserError, match=r"is not a link speed[\s\S]*fix: Write it as 20Mbit")
    with nullcontext() if megabits else refused:
        assert rate_of(text) == pytest.approx((megabits or 0.0) * MEGABIT)
