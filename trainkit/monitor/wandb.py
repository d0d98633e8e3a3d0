"""Weights & Biases: online when logged in, else offline (``wandb sync RUN/wandb/offline-run-*`` uploads later).

It gets metrics, the training settings and the use of this host: no environment, no code, no console output, no command
line, no list of packages. The run keeps its id over restarts, so that a requeued run is one run there too.

The client is another process, so that importing, starting and ending it keeps no training waiting: started before torch
is imported where possible (`prepare`), and fed with JSON lines through a pipe: ``{"init": arguments of wandb.init}``,
then ``{"log": values}`` and ``{"confusion": rows of a table, "step": step}``, at last ``{"finish": exit code}``. Where
they end without that, the training was killed, and the run has crashed. Training waits for the client at its end only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import netrc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import urlsplit

from trainkit import fileio
from trainkit.monitor import NOT_CURVES, Logger, Start, confusion_of_test, listed_name, say_off, training_settings
from trainkit.process import leave

if TYPE_CHECKING:
    from trainkit.config.schema import Config
    from trainkit.run.folder import RunDir

Mode = Literal["online", "offline", "disabled", "shared"]

CLIENT_SECONDS = 30.0
"""Patience with W&B's server, which must not hold GPUs; what is not sent stays on disk for `wandb sync`."""
_ENDING_SECONDS = 3 * CLIENT_SECONDS
"""Enough for the client to try the server in vain, begin offline and write everything."""
_MOST_HELD = 1 << 26
"""Bytes of records that a client may have left unread."""
_MOST_CLASSES = 100
"""W&B keeps no more rows of a chart than the confusion matrix of so many classes has."""
_REPORTED = 3
"""Exit code of a client that has reported why it failed."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""Signals for the process that trains, which saves then, and tells the client when to end."""

_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "save_code": False,  # else an account's own setting counts
    "disable_git": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "silent": True,
    "symlink": False,
}

_CLIENT = (
    "import sys; sys.path = [path for path in sys.path if path]; "
    "from trainkit import importing; importing.installed_first(); "
    "from trainkit.monitor.wandb import run_client; run_client()"
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
    """The client process; sending to it never waits."""

    def __init__(self) -> None:
        # The code that this process runs, which may be a job's snapshot, and not that of the current folder.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        env, command = {**os.environ, "PYTHONPATH": path}, [sys.executable, "-c", _CLIENT]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # until it ignores them itself
        try:
            self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        self._pipe, self._held = self._process.stdin, bytearray()
        os.set_blocking(self._pipe.fileno(), False)

    def send(self, **message: Any) -> None:
        """Send a message. Raises RuntimeError if the process died without a report, or has stopped reading."""
        if self._process.returncode is not None:
            return
        self._held += json.dumps(message).encode() + b"\n"
        self._write()
        if len(self._held) > _MOST_HELD:
            raise RuntimeError("its process reads nothing any more")

    def close(self) -> None:
        """Wait for its end. Raises RuntimeError if it does not come."""
        room = select.poll()
        if self._held:
            room.register(self._pipe, select.POLLOUT)
        while self._held and room.poll(1000 * _ENDING_SECONDS):
            self._write()
        self._end(_ENDING_SECONDS)

    def _write(self) -> None:
        try:
            while self._held:
                del self._held[: os.write(self._pipe.fileno(), self._held[: 1 << 16])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._held.clear()
            self._end(None)

    def _end(self, patience: float | None) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"it did not end within {patience:.0f} s") from None
        if code not in (0, _REPORTED):
            raise RuntimeError(f"its process has ended with exit code {code}")


class _Wandb:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        self._client = start.prepared if isinstance(start.prepared, _Client) else _Client()
        self._run_dir = run_dir
        fileio.make_folder(run_dir.wandb, run_dir.path)
        self._client.send(init=_init(run_dir, config, start))

    def log(self, record: Mapping[str, Any]) -> None:
        split = record["split"]
        values = {f"{key}/{split}": value for key, value in record.items() if key not in NOT_CURVES}
        self._client.send(log={key: record[key] for key in ("step", "epoch") if key in record} | values)
        if split == "test" and (confusion := confusion_of_test(self._run_dir, _MOST_CLASSES)) is not None:
            classes, counts = confusion
            pairs = itertools.product(classes, classes)
            rows = [[*pair, count] for pair, count in zip(pairs, itertools.chain(*counts), strict=True)]
            self._client.send(confusion=rows, step=record["step"])

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # closed while an exception passes: the run is marked as crashed there
        self._client.send(finish=int(failed))
        self._client.close()


def _init(run_dir: RunDir, config: Config, start: Start) -> dict[str, Any]:
    """Arguments of `wandb.init`."""
    # The use of this host, and of the process that trains. x_disable_machine_info would leave out that, too.
    sampling = max(config.monitor.hardware_every_seconds, 1.0)
    known = {"world_size": start.world_size, "params": start.params, "total_steps": start.total_steps}
    return {
        "project": os.environ.get("WANDB_PROJECT") or config.monitor.wandb_project,
        "id": run_id(run_dir),
        "name": listed_name(run_dir),
        "dir": str(run_dir.path),  # wandb adds its own folder `wandb`, which is `run_dir.wandb`
        "resume": "allow",
        "mode": mode(os.environ, Path.home()),
        "config": training_settings(config, start) | known,
        "settings": {
            **_SETTINGS,
            "init_timeout": CLIENT_SECONDS,
            "finish_timeout": CLIENT_SECONDS,
            "x_stats_pid": os.getpid(),
            "x_stats_sampling_interval": sampling,
        },
    }


def prepare() -> object:
    """Start the client; the run follows in `build`."""
    return _Client()


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """One wandb run per run folder, in project ``monitor.wandb_project`` (or WANDB_PROJECT)."""
    return _Wandb(run_dir, config, start)


def run_client() -> NoReturn:
    """The main program of the client."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    os.nice(5)  # training first
    try:
        _serve(json.loads(line) for line in sys.stdin.buffer)
    except Exception as error:
        say_off("wandb", error)
        leave(_REPORTED)
    leave(0)


def _serve(messages: Iterator[dict[str, Any]]) -> None:
    import wandb  # before the first message: meanwhile the process that trains imports torch

    first = next(messages, None)
    if first is None:  # the training failed before it opened its loggers
        return
    run = _begin(**first["init"])
    # Our own step is the x axis: wandb's counts calls, and a restart would draw points twice at other places.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    last: dict[str, Any] = {}
    for last in messages:
        if "confusion" in last:
            columns: list[str | int] = ["Actual", "Predicted", "nPredictions"]
            table = wandb.Table(columns=columns, data=last["confusion"])
            title = {"title": "Confusion matrix of the test"}
            # `wandb.plot.confusion_matrix` makes the same of every single sample; here are their counts.
            chart = wandb.plot_table("wandb/confusion_matrix/v1", table, {str(name): name for name in columns}, title)
            run.log({"step": last["step"], "confusion/test": chart})
        elif "log" in last:
            run.log(last["log"])
        else:  # not the pipe's end: a process that loads data may hold that open
            break
    run.finish(exit_code=last.get("finish", 1))
    wandb.teardown()  # its service has written all of the file once it is gone


def _begin(*, mode: str, settings: dict[str, Any], **arguments: Any) -> Any:
    import wandb

    try:
        return wandb.init(mode=mode, settings=wandb.Settings(**settings), **arguments)  # type: ignore[arg-type]
    except wandb.errors.Error as error:
        if mode != "online":
            raise
        # Compute nodes often have no way out.
        reason = str(error).splitlines()[0]
        print(f"wandb cannot be reached and goes on offline: {reason}", file=sys.stderr, flush=True)
        wandb.teardown()  # its service still holds the run's id
        return _begin(mode="offline", settings=settings, **arguments)
