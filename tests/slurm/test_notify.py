"""A real SLURM's job tells a receiver of webhooks, from its first node, how it has ended."""

import re

import pytest

from tests.launch.test_notify import SECRET, Receiver
from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm


def test_a_job_tells_how_it_has_ended_and_records_no_address(devcluster: Cluster) -> None:
    pytest.importorskip("apprise")
    host = re.search(r"SlurmctldHost.*= \S+\(([\d.]+)\)", devcluster.run("scontrol", "show", "config").stdout)
    assert host, "nodes reach the machine of the controller by its address"
    (devcluster.home / "broken_model.py").write_text("def build(info):\n    raise RuntimeError('no such layer')\n")
    receiver = Receiver("0.0.0.0")
    address = receiver.address.replace("127.0.0.1", host[1])
    words = ["--nodes", "1", "--ntasks-per-node", "1", "--gpus-per-node", "0", "model.name=broken_model:build"]
    job_id, run, _ = devcluster.submit("told", *words, env={"TRAINKIT_NOTIFY": address})
    assert devcluster.wait(job_id) == "FAILED"
    assert [got["title"] for got in receiver.got] == ["told has ended: FAILED"], devcluster.logs()
    assert "no such layer" in receiver.got[0]["message"]
    assert not [file for file in run.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    receiver.server.shutdown()
    receiver.server.server_close()
