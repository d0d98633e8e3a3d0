"""A shell beside the ranks of a job, and Jupyter as a job, on a real SLURM."""

import json
import stat
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.runs import wait_until
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]


def test_a_shell_is_on_the_node_of_its_rank_also_of_a_task_of_an_array(devcluster: Cluster) -> None:
    (devcluster.home / "asleep.py").write_text("import time\ntime.sleep(300)\n")
    words = ("--nodes", "2", "--gpus-per-node", "0", "--time", "10", "--sweep", "x=1,2", "--run-dir", "runs/two")
    devcluster.job("submit", "asleep.py", *words, "--", "{x}")
    second = devcluster.home / "runs" / "two" / "1"
    devcluster.wait_for_start(second)
    hosts = []
    for rank in ("0", "1"):
        shell = [sys.executable, "-m", "jobs.shell", str(second), "--rank", rank, "--"]
        told = devcluster.run(*shell, "sh", "-c", "hostname; echo ${RANK-none} $PYTHONPATH; exit 3", check=False)
        assert told.returncode == 3, told.stderr
        host, variables = told.stdout.splitlines()
        assert variables.startswith(f"none {second}/code")
        hosts.append(host)
    assert hosts == devcluster.events(second, "started")[0]["hosts"]
    shown = devcluster.run(sys.executable, "-m", "jobs.shell", str(second), "--top").stdout
    assert set(hosts) <= {line.split()[0] for line in shown.splitlines()}
    assert devcluster.states(devcluster.events(second, "submitted")[0]["job_id"]) == ["RUNNING"]
    devcluster.job("cancel", "runs/two")


def test_a_lab_is_open_to_who_can_read_its_token_and_to_nobody_else(devcluster: Cluster) -> None:
    pytest.importorskip("jupyterlab")
    mode = {"TRAINKIT_RUN_MODE": "755"}
    words = ("--gpus-per-node", "0", "--time", "10", "--run-dir", "runs/lab")
    said = devcluster.job("submit", "lab", *words, env=mode).stdout
    run = devcluster.home / "runs" / "lab"
    assert stat.S_IMODE((run / ".lab-address").stat().st_mode) == 0o600
    token = (run / ".lab-address").read_text().strip().partition("?token=")[2]
    place = json.loads((run / "lab.json").read_text())
    assert f"ssh -L {place['port']}:{place['host']}:{place['port']} " in said
    assert f"cat {run}/.lab-address -" in said
    assert token not in said
    api = f"http://{place['host']}:{place['port']}/api/contents"

    def status(url: str) -> int:
        try:
            return int(urlopen(url, timeout=20).status)
        except HTTPError as error:
            return error.code
        except OSError:  # it is starting
            return 0

    wait_until(lambda: status(api) == 403, 60)
    assert status(f"{api}?token={token}") == 200
    others = [file for file in run.rglob("*") if file.is_file() and token in file.read_text(errors="replace")]
    assert others == [run / ".lab-address"]
    processes = [file.read_text(errors="replace") for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not any(token in words for words in processes)
    again = devcluster.job("submit", "lab", *words[:4], env=mode).stdout
    assert f"ssh -L {place['port']}:" in again
    devcluster.job("cancel", "runs/lab")
