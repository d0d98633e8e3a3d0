"""64 ranks on 32 nodes: planned, submitted, met, told to save, gone on. They import no torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import light_experiment
from tests.slurm.conftest import Cluster, cluster_up, login

pytestmark = [pytest.mark.slurm, pytest.mark.long]

NODES = [f"n{number:02}" for number in range(1, 33)]
ALL = ("--nodes", "32", "--gpus-per-node", "2", "train.global_batch_size=64", "monitor.loggers=[jsonl]")
LIGHT = ("model.name=light_model:build", "model.seconds=2")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of 32 nodes with a run on all of them, which was told to save and went on to its end."""
    with cluster_up("--nodes", "32", "--gpus-per-node", "2") as env:
        cluster = login(env, tmp_path_factory.mktemp("wide"))
        light = {"PYTHONPATH": light_experiment.hook(cluster.home / "light")}
        whole, run, said = cluster.submit("whole", *ALL, *LIGHT, env=light)
        assert f"Submitted job {whole}: 32 nodes x 2 ranks" in said
        cluster.wait_for_start(run)
        cluster.run("scancel", "--signal=USR2", whole)
        assert cluster.wait(whole, timeout=240) == "COMPLETED", cluster.logs()
        yield cluster


def _run(cluster: Cluster) -> Path:
    return cluster.home / "runs" / "whole"


def test_each_of_64_ranks_knows_its_place_and_meets_the_others(wide: Cluster) -> None:
    ranks: list[dict[str, Any]] = json.loads((_run(wide) / "ranks.json").read_text())
    assert [(rank["rank"], rank["local_rank"], rank["node_rank"], rank["host"]) for rank in ranks] == [
        (number, number % 2, number // 2, NODES[number // 2]) for number in range(64)
    ]
    alike = {"world_size": 64, "local_world_size": 2, "num_nodes": 32, "master_addr": "n01", "hosts": NODES}
    for rank in ranks:
        assert rank.items() >= {**alike, "master_port": ranks[0]["master_port"]}.items()


def test_ranks_that_are_told_to_save_hand_back_once_a_node_and_go_on(wide: Cluster) -> None:
    first, second = wide.events(_run(wide), "started")
    assert first["hosts"] == second["hosts"] == NODES
    assert 0 < second["step"] < first["total_steps"]
    handed = wide.events(_run(wide), "handed_back")
    assert [event["node_rank"] for event in sorted(handed, key=lambda event: int(event["node_rank"]))] == [*range(32)]
    assert {event["attempt"] for event in handed} == {0}
    trained = json.loads((_run(wide) / light_experiment.STATE).read_text())[1]
    assert trained == light_experiment.trained(first["total_steps"])
    # Each rank has its own logs in each attempt, and `logs` tells them apart.

    names = {f"rank-{rank}.{stream}" for rank in range(64) for stream in ("out", "err")}
    for attempt in ("0", "1"):
        assert {file.name for file in (_run(wide) / "logs" / attempt).glob("rank-*")} == names

    said = wide.job("logs", "whole", "--rank", "all", "--grep", "^rank ").stdout.splitlines()
    assert said == [
        f"[rank {rank:2}] rank {rank} of 64: {NODES[rank // 2]}, local rank {rank % 2}" for rank in range(64)
    ]
