"""Nodes that are bad for real, and networks that are not as one would wish, on a real SLURM."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import DEVCLUSTER, Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

QUICK = ("--ntasks-per-node", "1", "--cluster", "devcluster")
FAULTS = """
import sys, time
if "trainkit.distributed.health" in " ".join(sys.orig_argv):
    import torch
    right, now = torch.matmul, time.time
    def off_by_one(a, b):
        product = right(a, b)
        product[0, 0] += 1
        return product
    torch.matmul, time.time = off_by_one, lambda: now() + 7
"""


def on_node(cluster: Cluster, node: str, command: str) -> str:
    return cluster.run(str(DEVCLUSTER), "exec", node, *command.split()).stdout


@contextlib.contextmanager
def mounted(cluster: Cluster, node: str, place: Path, what: str) -> Iterator[None]:
    on_node(cluster, node, f"mount {what} {place}")
    try:
        yield
    finally:
        on_node(cluster, node, f"umount --lazy {place}")


@pytest.fixture(scope="module")
def checked(devcluster: Cluster) -> dict[str, Any]:
    """A check of three nodes: n3's link sends slowly; n4's clock, arithmetic and scratch disk are bad."""
    home = devcluster.home
    for name in ("bad", "site", "scratch"):
        (home / name).mkdir()
    (home / "bad" / "sitecustomize.py").write_text(FAULTS)
    with contextlib.ExitStack() as held:
        held.enter_context(mounted(devcluster, "n4", home / "site", f"--bind {home / 'bad'}"))
        held.enter_context(mounted(devcluster, "n4", home / "scratch", "-t tmpfs -o size=2m tmpfs"))
        on_node(devcluster, "n3", "tc qdisc add dev eth0 root tbf rate 20mbit burst 32k latency 400ms")
        held.callback(on_node, devcluster, "n3", "tc qdisc del dev eth0 root")
        env = {"PYTHONPATH": str(home / "site"), "TMPDIR": str(home / "scratch")}
        command = ("check", "--nodes", "3", "--nodelist", "n2,n3,n4", *QUICK, "--json")
        done = devcluster.job("cluster", *command, check=False, env=env)
    report: dict[str, Any] = json.loads(done.stdout)
    return report | {"code": done.returncode}


def test_a_check_ends_with_3_and_says_what_is_bad_about_which_node(checked: dict[str, Any]) -> None:
    assert (checked["code"], checked["bad"]) == (3, ["n3", "n4"])
    said: dict[str, list[tuple[str, str]]] = {}
    for item in checked["findings"]:
        said.setdefault(item["check"], []).append((item["node"], item["what"]))
    ((node, words),) = said["network"]
    assert (node, "n2 - n3" in words, "n3 - n4" in words) == ("n3", True, True), "what both slow pairs share"
    assert said["clock"] == [("n4", "+7.0 s from the others'")]
    assert {node for node, _ in said["matmul"]} == {"n4"}
    ((node, words),) = said["disk"]
    assert node == "n4"
    assert re.fullmatch(r"\S+/scratch: \d MB free", words)


@pytest.fixture
def odd_networks(devcluster: Cluster) -> Iterator[None]:
    """n1 is loopback to itself, as Debian does; n2 knows itself by a network that n1 is not in; fast0 links the two."""
    hosts = devcluster.run("cat", f"{devcluster.env['DEVCLUSTER_DIR']}/etc/hosts").stdout
    pids = [_pid(devcluster, node) for node in ("n1", "n2")]
    with contextlib.ExitStack() as held:
        for node, address in (("n1", "127.0.1.1"), ("n2", "192.0.2.2")):
            own = devcluster.home / f"hosts-{node}"
            own.write_text(re.sub(rf"^\S+ {node}$", f"{address} {node}", hosts, flags=re.MULTILINE))
            held.enter_context(mounted(devcluster, node, Path("/etc/hosts"), f"--bind {own}"))
        on_node(devcluster, "n2", "ip link add mgmt0 type veth peer name mgmt1")
        held.callback(on_node, devcluster, "n2", "ip link del mgmt0")
        on_node(devcluster, "n2", "ip addr add 192.0.2.2/24 dev mgmt0")
        on_node(devcluster, "n2", "ip link set mgmt0 up")
        link = f"ip link add fast0 netns {pids[0]} type veth peer name fast0 netns {pids[1]}"
        devcluster.run(*link.split())
        held.callback(on_node, devcluster, "n1", "ip link del fast0")
        for number, node in enumerate(("n1", "n2"), start=1):
            on_node(devcluster, node, f"ip addr add 198.51.100.{number}/24 dev fast0")
            on_node(devcluster, node, "ip link set fast0 up")
        yield


def _pid(cluster: Cluster, node: str) -> str:
    return Path(cluster.env["DEVCLUSTER_DIR"], "run", f"node-{node}.pid").read_text().split()[0]


def _received(cluster: Cluster, node: str, interface: str) -> int:
    """Bytes."""
    lines = on_node(cluster, node, "cat /proc/net/dev").splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{interface}:"))


@pytest.mark.usefixtures("odd_networks")
def test_ranks_use_the_interface_that_the_site_names(devcluster: Cluster) -> None:
    two = ("--nodes", "2", "--nodelist", "n1,n2", *QUICK)
    assert devcluster.job("cluster", "check", *two).stdout.endswith("All good.\n")  # over the route to the head node
    assert _received(devcluster, "n2", "fast0") < 100_000
    settings = ("train.max_steps=2", "launch.interface=fast0", "monitor.loggers=[jsonl]")
    devcluster.job("submit", "ddp", *two, "--wait", "--run-dir", "two-networks", *settings)
    assert _received(devcluster, "n2", "fast0") > 500_000  # gradients, both ways


def test_training_is_proved_on_two_nodes_within_ten_minutes(devcluster: Cluster) -> None:
    command = ("check", "--train", "--nodes", "2", "--nodelist", "n1,n2", *QUICK, "--time", "10", "--wait")
    done = devcluster.job("cluster", *command, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training works here: 18 of 18 passed." in done.stdout
    (page,) = (devcluster.home / "runs").glob("bench-proof-*/proof.md")
    told = page.read_text()
    assert "2 ranks on 2 nodes, cpu" in told
    assert "n1" not in told
    assert str(devcluster.home) not in told
