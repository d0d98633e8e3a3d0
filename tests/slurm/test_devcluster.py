"""The development cluster's own manners; that it is a SLURM, the other tests here show."""

import os
import subprocess
from pathlib import Path

import pytest

DEVCLUSTER = Path(__file__).parents[2] / "slurm" / "devcluster"


def devcluster(
    folder: Path, *arguments: str, net: str = "10.255.255", slurm: str = ""
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DEVCLUSTER_DIR": str(folder), "DEVCLUSTER_NET": net, "DEVCLUSTER_SLURM": slurm}
    return subprocess.run([DEVCLUSTER, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False)


def test_without_a_command_it_prints_its_help(tmp_path: Path) -> None:
    done = devcluster(tmp_path)
    assert done.returncode == 2
    for word in ("up", "down [--purge]", "--gpus-per-node", "crash NODE", "DEVCLUSTER_DIR", "DEVCLUSTER_NET"):
        assert word in done.stdout


def test_a_folder_that_holds_something_else_is_neither_used_nor_purged(tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter1.tex").write_text("x")
    assert devcluster(mine, "down", "--purge").returncode == 0
    assert not Path(f"{mine}.lock").exists()
    if os.geteuid() == 0:  # only root gets as far as to look at the folder
        done = devcluster(mine, "up")
        assert (done.returncode, "holds files of something else" in done.stderr) == (1, True)
    assert [entry.name for entry in mine.iterdir()] == ["chapter1.tex"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets as far as to look for SLURM")
def test_what_is_no_network_or_no_slurm_is_refused(tmp_path: Path) -> None:
    done = devcluster(tmp_path, "up", net="home")
    assert (done.returncode, "DEVCLUSTER_NET=home" in done.stderr) == (2, True)
    done = devcluster(tmp_path, "up", slurm="/no/such/prefix")
    words = "devcluster: DEVCLUSTER_SLURM: there is no /no/such/prefix/sbin/slurmctld\n"
    assert (done.returncode, done.stderr) == (1, words)


def test_the_prefix_of_a_cluster_is_first_in_the_path_of_its_clients(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm").write_text("/opt/slurm-25.11\n")
    said = devcluster(tmp_path, "env").stdout
    assert said == f"export SLURM_CONF={tmp_path}/etc/slurm.conf PATH=/opt/slurm-25.11/bin:$PATH\n"


@pytest.mark.slurm
def test_a_port_that_is_taken_is_named_with_what_to_change(slurm_env: dict[str, str], tmp_path: Path) -> None:
    """A cluster in another network with the same third number takes it."""
    third = int(slurm_env["DEVCLUSTER_NET"].rpartition(".")[2])
    done = devcluster(tmp_path, "up", "--nodes", "1", net=f"10.99.{third}")
    devcluster(tmp_path, "down", "--purge")
    assert done.returncode == 1
    assert f"port {24000 + 2 * third} is taken" in done.stderr
    assert f"set DEVCLUSTER_NET to a network with another third number than {third}" in done.stderr
