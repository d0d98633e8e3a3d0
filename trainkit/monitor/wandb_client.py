"""W&B's client, in a process of its own: importing, starting and ending it keeps no training waiting.

Fed with JSON lines by `trainkit.monitor.wandb`: ``{"init": what wandb.init takes}``, then ``{"log": values}`` and
``{"confusion": rows of a table, "step": step}``, at last ``{"finish": exit code}``. Where they end without that,
whoever trained is gone, and the run has crashed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from trainkit import lifetime

HAS_SAID_WHY = 3
"""Exit code of one that failed: nobody need say it again."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""Meant for whoever trains, who saves then, and says when it is over."""


def main() -> NoReturn:
    """Be the client, and exit."""
    lifetime.begin()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    os.nice(5)  # training first
    try:
        _serve(json.loads(line) for line in sys.stdin.buffer)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"Logger 'wandb' is off from here on: {reason}", file=sys.stderr, flush=True)
        lifetime.leave(HAS_SAID_WHY)
    lifetime.leave(0)


def _serve(messages: Iterator[dict[str, Any]]) -> None:
    import wandb  # before it is known what for: meanwhile torch is imported where it trains

    first = next(messages, None)
    if first is None:  # it has not come to that
        return
    run = _begun(**first["init"])
    # Our own step is the x axis: wandb's counts calls, and a restart would draw points twice at other places.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    exit_code = 1
    for message in messages:
        if "finish" in message:
            exit_code = message["finish"]
            break
        if "confusion" in message:
            columns: list[str | int] = ["Actual", "Predicted", "nPredictions"]
            table = wandb.Table(columns=columns, data=message["confusion"])
            title = {"title": "Confusion matrix of the test"}
            # As `wandb.plot.confusion_matrix` makes it, which wants every sample and not their counts.
            chart = wandb.plot_table("wandb/confusion_matrix/v1", table, {str(name): name for name in columns}, title)
            run.log({"step": message["step"], "confusion/test": chart})
            continue
        run.log(message["log"])
    run.finish(exit_code=exit_code)
    wandb.teardown()  # its service has written all of the file once it is gone


def _begun(*, mode: str, settings: dict[str, Any], **arguments: Any) -> Any:
    import wandb
    from wandb.sdk.wandb_run import Run

    # It asks whether W&B's own scheduler has inputs for this run, which has none, and for that imports all of W&B's API
    # and a compiler of data classes: 2 s of each start.
    if hasattr(Run, "_detect_and_apply_job_inputs"):
        setattr(Run, "_detect_and_apply_job_inputs", _none)  # noqa: B010

    def begin(mode: Any) -> Any:
        return wandb.init(mode=mode, settings=wandb.Settings(**settings), **arguments)

    try:
        return begin(mode)
    except wandb.errors.Error as error:
        if mode != "online":
            raise
        # Compute nodes often have no way out.
        reason = str(error).splitlines()[0]
        print(f"wandb cannot be reached and goes on offline: {reason}", file=sys.stderr, flush=True)
        wandb.teardown()  # its service still holds the run's id
        return begin("offline")


def _none(run: Any) -> None: ...
