"""Jupyter as a job: the program of the preset ``lab``, and the command that opens it from elsewhere.

The rank becomes Jupyter, without what made it a rank: what one does in a notebook is not the run's. Its token is known
to the user alone: it stands in a file that nobody else can read, and in no argument and no log.
"""

import importlib.util
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.cluster.job_states import job_state
from trainkit.cluster.ranks import address_towards
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.common.hosts import free_port
from trainkit.common.process import run_program, scrubbed
from trainkit.config.schema import Config, LaunchConfig
from trainkit.launch.follow import LOOK_SECONDS, RunWatch, end_of
from trainkit.run.events import RUN_DIR
from trainkit.run.folder import LAB, RunDir

MODULE = "trainkit.launch.lab"
_PACKAGE = "jupyterlab"


def is_lab(config: Config) -> bool:
    """Return True for the settings of the preset ``lab``."""
    return config.script is not None and config.script.module == MODULE


def require_jupyter(launch: LaunchConfig) -> None:
    """Raise UserError where the environment of the job has no Jupyter, as far as can be seen from here."""
    kind, _, place = (launch.environment or "").partition(":")
    python = Path(sys.executable)
    found = importlib.util.find_spec(_PACKAGE) is not None
    if kind == "venv":
        python = Path(place).expanduser() / "bin" / "python"
        found = (python.parent / "jupyter-lab").is_file()
    elif launch.has_own_environment:
        return
    if not found:
        raise _missing(str(python), "; nothing was queued")


def _missing(python: str, end: str) -> UserError:
    why = f"{_PACKAGE} is not installed for {python}{end}."
    fix = f"{shlex.quote(python)} -m pip install {_PACKAGE}"
    return UserError("There is no Jupyter in the environment of the job.", why=why, fix=fix)


def open_lab(run: RunDir) -> int:
    """Wait until it runs, and say how it is opened; Ctrl-C leaves it queued. Returns the exit code.

    Raises RunFailedError if it has failed.
    """
    try:
        watched = RunWatch(run)
        watched.wait_for_start()
        while watched.is_alive() and not LAB.at(run.path).is_file():
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        terminal.say(f"\nDetached. Once it runs, `{terminal.command('submit', 'lab')}` says how to open it.")
        return 130
    state = job_state(run)
    if state.alive == "no":
        return end_of(run, state)
    told = fileio.read_object(LAB.at(run.path))
    address = f"{told.get('port')}:{told.get('host')}:{told.get('port')}"
    login = terminal.HOST.partition(":")[0] or f"{run.path.owner()}@{socket.gethostname()}"
    words = shlex.join(["ssh", "-L", address, login, "cat", str(run.path / _ADDRESS), "-"])
    terminal.say(f"Jupyter runs on {state.nodes}. On your own machine this opens the way, and prints the address:")
    terminal.say(f"\n  {words}\n")
    return 0


_ADDRESS = ".lab-address"


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Be the rank: write down where Jupyter listens, and become it. Returns an exit code if there is none."""
    run = RunDir(Path(env[RUN_DIR]))
    if importlib.util.find_spec(_PACKAGE) is None:
        terminal.warn(str(_missing(sys.executable, "")))
        return UserError.exit_code
    submitter = str(fileio.read_object(run.manifest).get("host", ""))
    host = "127.0.0.1"
    if submitter != socket.gethostname():
        host = address_towards(submitter) or socket.gethostname()
    port = free_port()
    token = secrets.token_urlsafe(32)
    address = f"http://localhost:{port}/lab?token={token}\n"
    fileio.write(run.path / _ADDRESS, address, run.path, private=True)
    LAB.send(run.path, {"host": host, "port": port})
    words = [sys.executable, "-m", _PACKAGE, "--no-browser", f"--ip={host}", f"--port={port}"]
    words += ["--ServerApp.port_retries=0", *arguments]
    if not os.geteuid():
        words.append("--allow-root")
    return os.execve(sys.executable, words, scrubbed(env) | {"JUPYTER_TOKEN": token})


if __name__ == "__main__":
    run_program(main)
