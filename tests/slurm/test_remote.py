"""From a laptop: the cluster behind a real sshd, behind a jump host, by the system's own ssh."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import debian, readme
from tests.slurm.conftest import Cluster
from trainkit.common.hosts import free_port

MODEL = """
from torch import nn


def build(info):
    return nn.Sequential(nn.Flatten(), nn.Linear(info.in_chans * info.image_size**2, info.num_classes))
"""


pytestmark = [pytest.mark.slurm, pytest.mark.long]


@dataclass(frozen=True)
class Laptop:
    """A machine without SLURM, and a folder on it with a model of the user's."""

    home: Path
    there: Path
    log: Path

    def job(self, verb: str, *arguments: str) -> str:
        """A command of the kit, with the login node as its host; what it prints."""
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "TRAINKIT_"))
        }
        env |= {"TRAINKIT_SSH": f"ssh -F {self.home.parent}/ssh_config", "XDG_STATE_HOME": str(self.home.parent)}
        command = [sys.executable, "-m", f"jobs.{verb}", *arguments, "--host", f"login:{self.there}"]
        done = subprocess.run(
            command, cwd=self.home, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr + self.log.read_text()[-2000:]
        return done.stdout

    def newest(self, name: str) -> Path:
        """The run of that name that was made last."""
        return max((self.there / "runs").glob(f"{name}-*"))


@pytest.fixture(scope="module")
def laptop(devcluster: Cluster) -> Iterator[Laptop]:
    server = _sshd()
    # Short, and not in pytest's own folder: the socket of the shared connection is in it.
    with tempfile.TemporaryDirectory(prefix="tk-") as folder:
        base, port = Path(folder), free_port()
        home, there, log = base / "laptop", base / "there", base / "sshd.log"
        home.mkdir()
        there.mkdir()
        (home / "my_net.py").write_text(MODEL)
        for words in ("init -q", "add .", "-c user.name=me -c user.email=me@here commit -qm first"):
            subprocess.run(["git", *words.split()], cwd=home, check=True)
        (there / ".venv").symlink_to(sys.prefix)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(base / key)], check=True)
        site = {name: devcluster.env[name] for name in ("SLURM_CONF", "OMP_NUM_THREADS")}
        site |= {"TRAINKIT_CLUSTER": "devcluster", "XDG_STATE_HOME": str(base / "state"), "HOME": str(base)}
        (base / "banner").write_text("*** AUTHORIZED USE ONLY ***\n")
        tools = Path(shutil.which("sbatch", path=devcluster.env["PATH"]) or "/usr/bin/sbatch").parent
        (base / ".bash_profile").write_text(f"printf 'Welcome, '; echo \"$USER\"\nexport PATH={tools}:$PATH\n")
        (base / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {base}/host\nAuthorizedKeysFile {base}/user.pub\n"
            f"PidFile none\nBanner {base}/banner\n"
            "UsePAM no\nStrictModes no\nPasswordAuthentication no\nLogLevel VERBOSE\n"
            f"SetEnv {' '.join(f'{name}={value}' for name, value in site.items())}\n"
        )
        (base / "ssh_config").write_text(
            f"Host gate login\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {base}/user\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {base}/known\nHost login\n  ProxyJump gate\n"
        )
        (base / "known").write_text(f"[127.0.0.1]:{port} {(base / 'host.pub').read_text()}")
        with (
            log.open("w") as said,
            subprocess.Popen([server, "-D", "-e", "-f", base / "sshd_config"], stderr=said) as sshd,
        ):
            try:
                deadline = time.monotonic() + 20
                while "listening" not in log.read_text() and time.monotonic() < deadline and sshd.poll() is None:
                    time.sleep(0.05)
                sockets = Path(f"/tmp/trainkit-{os.getuid()}")
                before = {*sockets.glob("*")}
                yield Laptop(home, there, log)
                for socket in {*sockets.glob("*")} - before:
                    close = ["ssh", "-F", f"{base}/ssh_config", "-o", f"ControlPath={socket}", "-O", "exit", "login"]
                    subprocess.run(close, capture_output=True, check=False)
            finally:
                sshd.terminate()


def _sshd() -> str:
    """The path of a real one."""
    sshd = debian.program("sshd", package="openssh-server")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return sshd


def test_a_run_is_submitted_watched_and_reported_from_a_laptop(laptop: Laptop) -> None:
    settings = ("model.name=my_net:build", "train.max_steps=2", "monitor.loggers=[console,jsonl]")
    submitted = laptop.job("submit", "single", *settings, "--wait")
    run = laptop.there / "runs" / "single-0001"
    assert f"python -m jobs.status {run} --host login:{laptop.there}\n" in submitted
    assert (run / "code" / "my_net.py").read_text() == MODEL
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=laptop.home, text=True).strip()
    assert json.loads((run / "manifest.json").read_text())["git"]["commit"] == commit
    (told,) = json.loads(laptop.job("status", "single-0001", "--json"))  # whatever the site greets its users with
    assert told["state"] == "COMPLETED"
    assert "step 2/2" in laptop.job("logs", "single-0001")
    files = [Path(line) for line in laptop.job("report", "single-0001").splitlines()]
    assert laptop.home / "report" / "logbook.md" in files
    assert "single-0001" in (laptop.home / "report" / "logbook.md").read_text()
    # All of it over one connection through the jump host, so that a second factor is asked for once.
    assert laptop.log.read_text().count("Accepted publickey") == 2


def test_the_guides_commands_for_a_login_node_work_as_they_stand(laptop: Laptop, devcluster: Cluster) -> None:
    (block,) = readme.blocks("login node", readme.SLURM)
    for line in block:
        python, m, module, *words, flag, host = shlex.split(line)
        assert (python, m, flag, host) == ("python", "-m", "--host", "me@login.example.org")
        if module == "jobs.report":  # of a run that has not begun there is nothing to report
            run = laptop.newest("single")
            devcluster.wait_for("the start", (run / "metrics.jsonl").exists, timeout=240)
        laptop.job(module.removeprefix("jobs."), *words)
    laptop.job("cancel", laptop.newest("single").name)


def test_training_is_proved_on_a_cluster_from_a_laptop(laptop: Laptop) -> None:
    words = ("check", "--train", "--arms", "as-on-cpu,ddp-resumed,killed-resumed", "--ntasks-per-node", "2", "--wait")
    assert "Training works here: 3 of 3 passed." in laptop.job("cluster", *words)
