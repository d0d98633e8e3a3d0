"""Weights & Biases: online when logged in, else offline (``wandb sync RUN/wandb/offline-run-*`` uploads later).

Nothing but metrics and the training settings is handed over: no environment, no code, no console output, no command
line, no list of packages. The run keeps its id over restarts, so that a requeued run is one run there too.
"""

from __future__ import annotations

import hashlib
import netrc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from trainkit.config.schema import Config
from trainkit.monitor.base import Logger, Start
from trainkit.records.rundir import RunDir

Mode = Literal["online", "offline", "disabled", "shared"]

CLIENT_SECONDS = 30.0  # a server that does not answer must not hold GPUs; what is left stays on disk for `wandb sync`
# What a run was trained with. `launch` stays here: its setup lines and mail address are nobody's business.
_SETTINGS = {"seed", "model", "data", "train", "optim", "schedule", "strategy"}

_NOT_CURVES = ("time", "step", "split", "epoch", "samples")

PEERS = "judge"


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


class _Wandb:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        import wandb

        wanted = mode(os.environ, Path.home())
        try:
            self._run = _init(run_dir, config, start, wanted)
        except wandb.errors.Error as error:
            if wanted != "online":
                raise
            # Compute nodes often have no way out.
            reason = str(error).splitlines()[0]
            print(f"wandb cannot be reached and goes on offline: {reason}", file=sys.stderr, flush=True)
            wandb.teardown()  # its service still holds the run's id
            self._run = _init(run_dir, config, start, "offline")
        # Our own step is the x axis: wandb's counts calls, and a restart would draw points twice at other places.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Mapping[str, Any]) -> None:
        split = record["split"]
        values = {f"{key}/{split}": value for key, value in record.items() if key not in _NOT_CURVES}
        self._run.log({key: record[key] for key in ("step", "epoch") if key in record} | values)

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # closed while an exception passes: the run is marked as crashed there
        self._run.finish(exit_code=int(failed))


def _init(run_dir: RunDir, config: Config, start: Start, mode: Mode) -> Any:
    import wandb
    from wandb.sdk.wandb_run import Run

    # It asks whether W&B's own scheduler has inputs for this run, which has none, and for that imports all of W&B's API
    # and a compiler of data classes: 2 s of each start.
    if hasattr(Run, "_detect_and_apply_job_inputs"):
        setattr(Run, "_detect_and_apply_job_inputs", _none)  # noqa: B010
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        x_disable_stats=True,  # the run folder has its own samples, of every host
        silent=True,
        symlink=False,
        init_timeout=CLIENT_SECONDS,
        finish_timeout=CLIENT_SECONDS,
        finish_timeout_raises=False,
    )
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT") or config.monitor.wandb_project,
        id=run_id(run_dir),
        name=run_dir.name,
        dir=str(run_dir.path),  # wandb adds its own folder `wandb`, which is `run_dir.wandb`
        resume="allow",
        mode=mode,
        config={
            **config.model_dump(mode="json", include=_SETTINGS),
            "world_size": start.world_size,
            "params": start.params,
            "total_steps": start.total_steps,
        },
        settings=settings,
    )


def _none(run: Any) -> None: ...


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """One wandb run per run folder, in project ``monitor.wandb_project`` (or WANDB_PROJECT)."""
    return _Wandb(run_dir, config, start)
