"""Weights & Biases: online when logged in, else offline; `sync` uploads later.

It gets metrics, the training settings and the use of this host: no environment, no code, no console output, no command
line, no list of packages. The run keeps its id over restarts, so that a requeued run is one run there too.

W&B's own service, a process that `wandb.init` starts, writes and sends what it is told. A TERM for all processes of a
job ends it while training saves, with what it had not yet written. So it is started again at the end then, and told
once more what this attempt has recorded in ``metrics.jsonl``; without the logger `jsonl` there is nothing to tell.

`sync` tells it all that ``metrics.jsonl`` has, of every attempt, as one run, which replaces what the server has of it.
W&B's own ``wandb sync`` makes of each attempt's folder the whole run: the last one wins (wandb 2423, 3841, 4624, 5865).
"""

import itertools
import netrc
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import urlsplit

from trainkit.cluster.signals import SIGNALS
from trainkit.common import fileio, terminal
from trainkit.common.errors import RunFailedError, TrainkitError, UserError
from trainkit.config.schema import Config
from trainkit.monitor.base import (
    NOT_CURVES,
    Logger,
    Sender,
    Start,
    confusion_of_test,
    listed_name,
    run_id,
    training_settings,
)
from trainkit.run.folder import RunDir
from trainkit.run.labels import shown_labels
from trainkit.run.metrics import read_metrics

Mode = Literal["online", "offline", "disabled", "shared"]

PATIENCE_SECONDS = 10.0
"""With W&B's server, which must not hold GPUs; what is not sent stays in ``metrics.jsonl`` for `sync`."""
END_SECONDS = 4 * PATIENCE_SECONDS
"""For what is not sent at the end of an attempt: to begin and to finish, and both again if its service has died."""
SYNC_SECONDS = 600.0
"""With W&B's server, while somebody waits for it."""
_MOST_CLASSES = 100
"""W&B keeps as many rows of a chart as the confusion matrix of this many classes has."""

PEERS = "judge"
_LONGEST_NAME = 128
"""Characters of a run's name that W&B takes."""


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


class _Wandb:
    """Args:
    replayed_in: a folder for the client's own files, where a run is sent that is over; None: it trains.
    """

    def __init__(self, run_dir: RunDir, config: Config, start: Start, *, replayed_in: str | None = None) -> None:
        self._replayed_in = replayed_in
        self._run_dir = run_dir
        self.project = os.environ.get("WANDB_PROJECT") or config.monitor.wandb_project
        self._every_seconds = max(config.monitor.hardware_every_seconds, 1.0)
        self._settings = training_settings(config, start)
        self._since = round(time.time(), 3)  # as records have it
        self._is_lost = False
        if replayed_in is None:
            fileio.make_folder(run_dir.wandb, run_dir.path)

    def begin(self) -> set[tuple[str, int]]:
        import wandb

        try:
            self._run = self._begin(mode(os.environ, Path.home()))
        except Exception:  # its service has died, perhaps of a TERM for the whole job, whose records are still to come
            with suppress(Exception):
                wandb.teardown()
            self._run = self._begin(mode(os.environ, Path.home()))
        return set()

    def replay(self) -> int:
        """Send every record, with the time at which it was made; how many."""
        self.begin()
        records = read_metrics(self._run_dir)
        for record in records:
            self._send(record, at=record.get("time"))
        self._run.finish(exit_code=0)
        return len(records)

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        try:
            for record in records:
                self._send(record)
        except ConnectionError:  # a TERM for the job reaches the service, too, and it heeds no mask for that one
            self._is_lost = True

    def end(self, *, failed: bool) -> None:
        import wandb

        try:
            self._run.finish(exit_code=int(failed))
        except Exception:  # its service died meanwhile: wandb has several errors for that
            self._is_lost = True
        if self._is_lost:  # with what it had not yet written
            with suppress(Exception):
                wandb.teardown()
            self._run = self._begin(mode(os.environ, Path.home()))
            for record in read_metrics(self._run_dir):
                if record["time"] >= self._since:
                    self._send(record)
            self._run.finish(exit_code=int(failed))
        wandb.teardown()  # its service has written all of the file once it is gone

    def _begin(self, mode: Mode) -> Any:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else it reports its own troubles, when Python ends
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_code=True,
            save_code=False,  # else an account's own setting counts
            disable_git=True,
            x_disable_meta=True,  # x_disable_machine_info would leave out the use of this host, too
            x_save_requirements=False,
            silent=True,
            symlink=False,
            init_timeout=PATIENCE_SECONDS,
            finish_timeout=SYNC_SECONDS if self._replayed_in else PATIENCE_SECONDS,
            finish_timeout_raises=self._replayed_in is not None,
            x_disable_stats=self._replayed_in is not None,
            x_stats_sampling_interval=self._every_seconds,
        )
        labels = shown_labels(self._run_dir)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # which the service inherits
        try:
            run = wandb.init(
                project=self.project,
                id=run_id(self._run_dir),
                name=listed_name(self._run_dir)[:_LONGEST_NAME],
                # wandb adds its own folder `wandb`, which is `RunDir.wandb`.
                dir=self._replayed_in or str(self._run_dir.path),
                resume=None if self._replayed_in else "allow",  # None: it replaces what is there
                mode=mode,
                config=self._settings,
                tags=list(labels.tags) or None,  # else those that were given there are taken off
                notes="\n".join(note.text for note in labels.notes) or None,
                settings=settings,
            )
        except wandb.errors.Error as error:
            if mode != "online" or self._replayed_in:
                raise
            # Compute nodes often have no way out.
            reason = str(error).splitlines()[0]
            terminal.warn(f"wandb cannot be reached and continues offline: {reason}")
            wandb.teardown()  # its service still holds the run's id
            return self._begin("offline")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Our own step is the x axis: wandb's counts calls, and a restart would draw points twice at other places.
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def _send(self, record: Mapping[str, Any], at: float | None = None) -> None:
        split = record["split"]
        values = {f"{key}/{split}": value for key, value in record.items() if key not in NOT_CURVES}
        for key, value in (("step", record["step"]), ("epoch", record.get("epoch")), ("_timestamp", at)):
            if value is not None:
                values[key] = value
        self._run.log(values)
        if split == "test":
            confusion = confusion_of_test(self._run_dir, _MOST_CLASSES)
            if confusion is not None:
                self._run.log({"step": record["step"], "confusion/test": _confusion_chart(*confusion)})


def _confusion_chart(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Any:
    """Chart as `wandb.plot.confusion_matrix` makes it of every single sample, made of their counts."""
    import wandb

    pairs = itertools.product(classes, classes)
    rows = [[*pair, count] for pair, count in zip(pairs, itertools.chain(*counts), strict=True)]
    columns: list[str | int] = ["Actual", "Predicted", "nPredictions"]
    table = wandb.Table(columns=columns, data=rows)
    title = {"title": "Confusion matrix of the test"}
    return wandb.plot_table("wandb/confusion_matrix/v1", table, {str(name): name for name in columns}, title)


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """One wandb run per run folder, in project ``monitor.wandb_project`` (or WANDB_PROJECT)."""
    return Sender(_Wandb(run_dir, config, start), run_dir, until=None, patience=END_SECONDS)


def sync(run_dir: RunDir, config: Config, start: Start) -> str:
    """Upload all attempts of a run as one; what was sent, and where to.

    Raises:
        UserError: this user is not logged in, or the record cannot be read.
        RunFailedError: the server cannot be reached, or did not take it all.
    """
    how = mode(os.environ, Path.home())
    if how != "online":
        why = f"WANDB_MODE={how}." if os.environ.get("WANDB_MODE") else "There is neither WANDB_API_KEY nor a login."
        raise UserError("W&B is not online here.", why=why, fix="`wandb login`, and leave WANDB_MODE unset.")
    import wandb

    with TemporaryDirectory(prefix="trainkit-") as folder:
        try:
            logger = _Wandb(run_dir, config, start, replayed_in=folder)
            count = logger.replay()
            why = ""
        except TrainkitError:
            raise
        except Exception as error:  # of W&B's client, which has several kinds, and of the libraries below it
            why = f"{terminal.one_line(error).rstrip('.')}."
        finally:
            with suppress(Exception):
                wandb.teardown()
        if why or not _has_arrived(Path(folder)):
            why = why or "The server has refused some of it."
            fix = "Repeat the command: it sends the whole run again."
            raise RunFailedError(f"{run_dir.name} is not at W&B yet.", why=why, fix=fix)
    return f"{count:,} records as {run_id(run_dir)} in {logger.project}"


def _has_arrived(folder: Path) -> bool:
    """True if the server has taken the end of a run: what it refuses W&B's client tells its own log alone."""
    is_last = False
    is_taken = False
    for file in folder.rglob("debug-internal.log"):
        for line in fileio.read_text(file).splitlines():
            said = fileio.parse_object(line) or {}
            if said.get("msg") == "filestream: sending request":
                is_last = said.get("complete") is True
            elif said.get("msg") == "filestream: request sent":
                is_taken = is_taken or (is_last and str(said.get("status")).startswith("200"))
    return is_taken
