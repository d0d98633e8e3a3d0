"""Weights & Biases: online when logged in, else offline (``wandb sync RUN/wandb/offline-run-*`` uploads later).

Nothing but metrics, the training settings and the use of this host is handed over: no environment, no code, no console
output, no command line, no list of packages. The run keeps its id over restarts, so that a requeued run is one run
there too.

The client is a process of its own (`trainkit.monitor.wandb_client`), started before torch is imported where that can be
(`prepare`), and fed through a pipe. Training never waits for it but at its end, for what it still has to write or send.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import netrc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from trainkit import fileio
from trainkit.config.schema import Config
from trainkit.fileio import Notice
from trainkit.monitor.base import Logger, Start
from trainkit.monitor.described import settings, shown_name, taken_for
from trainkit.monitor.wandb_client import HAS_SAID_WHY, IGNORED
from trainkit.run.folder import RunDir

Mode = Literal["online", "offline", "disabled", "shared"]

CLIENT_SECONDS = 30.0  # a server that does not answer must not hold GPUs; what is left stays on disk for `wandb sync`
_ENDING_SECONDS = 3 * CLIENT_SECONDS
"""To reach a server in vain, begin offline and write what there is takes the client no longer."""
_MOST_HELD = 1 << 26
"""Bytes of records that a client has not taken yet."""
_MOST_CLASSES = 100
"""More are more rows than W&B keeps of a chart."""

_NOT_CURVES = ("time", "step", "split", "epoch", "samples")

_CLIENT = (
    "import sys; sys.path = [path for path in sys.path if path]; "
    "from trainkit import importing; importing.installed_first(); "
    "from trainkit.monitor.wandb_client import main; main()"
)

PEERS = "judge"
PREPARES = True


def run_id(run_dir: RunDir) -> str:
    """The same for every attempt of a run, different for runs of one name in different folders."""
    digest = hashlib.sha256(str(run_dir.path).encode()).hexdigest()
    return f"{run_dir.name}-{digest[:8]}"


def mode(env: Mapping[str, str], home: Path) -> Mode:
    """``WANDB_MODE`` if set; else online with an API key in the environment or in ~/.netrc; else offline."""
    asked = env.get("WANDB_MODE", "").lower()
    if asked in ("online", "offline", "disabled", "shared"):
        return asked  # type: ignore[return-value]
    if env.get("WANDB_API_KEY"):
        return "online"
    server = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        known = netrc.netrc(env.get("NETRC") or home / ".netrc").hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return "online" if server in known else "offline"


class _Client:
    """The process, to be fed without ever waiting for it."""

    def __init__(self) -> None:
        # Beside what this process runs, and not what lies in the current folder: a job's snapshot, not a checkout.
        own = str(Path(__file__).parents[2])
        path = os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # until it ignores them itself
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CLIENT],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._held = bytearray()

    def send(self, **message: Any) -> None:
        """A message. Raises RuntimeError if the process is gone without having said why, or takes nothing any more."""
        if self._process.returncode is not None:
            return
        self._held += json.dumps(message).encode() + b"\n"
        self._write()
        if len(self._held) > _MOST_HELD:
            raise RuntimeError("its process takes nothing any more")

    def close(self) -> None:
        """Wait until it has ended. Raises RuntimeError if it does not."""
        process = self._process
        room = select.poll()
        room.register(self._pipe, select.POLLOUT)
        while self._held and room.poll(1000 * _ENDING_SECONDS):
            self._write()
        self._hang_up()
        try:
            deadline = time.monotonic() + _ENDING_SECONDS
            with Notice(process=process.pid) as notice:
                while process.poll() is None and time.monotonic() < deadline:
                    notice.wait(0.05)
            process.wait(0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"it did not come to its end within {_ENDING_SECONDS:.0f} s") from None
        self._check()

    def _write(self) -> None:
        try:
            while self._held:
                del self._held[: os.write(self._pipe, self._held[: 1 << 16])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._held.clear()
            self._hang_up()
            self._process.wait()
            self._check()

    def _hang_up(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]  # it has one

    def _check(self) -> None:
        if self._process.returncode not in (0, HAS_SAID_WHY):
            raise RuntimeError(f"its process has ended with exit code {self._process.returncode}")


class _Wandb:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        self._client = start.prepared if isinstance(start.prepared, _Client) else _Client()
        self._run_dir = run_dir
        fileio.make_folder(run_dir.wandb, run_dir.path)
        self._client.send(init=_init(run_dir, config, start))

    def log(self, record: Mapping[str, Any]) -> None:
        split = record["split"]
        values = {f"{key}/{split}": value for key, value in record.items() if key not in _NOT_CURVES}
        self._client.send(log={key: record[key] for key in ("step", "epoch") if key in record} | values)
        if split == "test" and (taken := taken_for(self._run_dir, _MOST_CLASSES)) is not None:
            rows = [
                [name, other, count]
                for name, counts in zip(taken.classes, taken.rows(), strict=True)
                for other, count in zip(taken.classes, counts, strict=True)
            ]
            self._client.send(confusion=rows, step=record["step"])

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # closed while an exception passes: the run is marked as crashed there
        self._client.send(finish=int(failed))
        self._client.close()


def _init(run_dir: RunDir, config: Config, start: Start) -> dict[str, Any]:
    """What `wandb.init` takes."""
    how = {
        "console": "off",
        "disable_code": True,
        "disable_git": True,
        "disable_job_creation": True,
        "save_code": False,
        "x_disable_meta": True,
        "x_save_requirements": False,
        # The use of this host, and of the process that trains. x_disable_machine_info would leave that out, too.
        "x_stats_pid": os.getpid(),
        "x_stats_sampling_interval": max(config.monitor.hardware_every_seconds, 1.0),
        "silent": True,
        "symlink": False,
        "init_timeout": CLIENT_SECONDS,
        "finish_timeout": CLIENT_SECONDS,
        "finish_timeout_raises": False,
    }
    return {
        "project": os.environ.get("WANDB_PROJECT") or config.monitor.wandb_project,
        "id": run_id(run_dir),
        "name": shown_name(run_dir),
        "dir": str(run_dir.path),  # wandb adds its own folder `wandb`, which is `run_dir.wandb`
        "resume": "allow",
        "mode": mode(os.environ, Path.home()),
        "config": {
            **settings(config, start),
            "world_size": start.world_size,
            "params": start.params,
            "total_steps": start.total_steps,
        },
        "settings": how,
    }


def prepare() -> object:
    """Start the client, which is told later of what."""
    return _Client()


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """One wandb run per run folder, in project ``monitor.wandb_project`` (or WANDB_PROJECT)."""
    return _Wandb(run_dir, config, start)
