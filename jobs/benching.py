"""What a bench's job runs in every task: one rank of it."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from trainkit.bench.request import BenchDir
from trainkit.config.loading import load
from trainkit.errors import TrainkitError
from trainkit.ranks.signals import heartbeat, stop_on_signal
from trainkit.run.events import Attempt, Writer, job_of, writing
from trainkit.run.folder import RunDir, as_open_as


def run_rank(folder: str) -> str:
    """One rank of the bench in ``folder``. How it ended.

    The signal handlers come first: until they are in place, the signal of a time limit would kill the task.
    """
    with stop_on_signal() as stop, ExitStack() as held:
        try:
            run_dir = BenchDir(RunDir.open(Path(folder)).path)
            held.enter_context(as_open_as(run_dir.path))
            config = load(str(run_dir.config)).config
            env = dict(os.environ)
            from trainkit.bench import run  # and with it torch
            from trainkit.ranks.env import RankEnv, Secret

            def open_run() -> Writer:
                attempt = Attempt.named_in(env) or Attempt.begin(run_dir)
                return held.enter_context(writing(attempt, job_id=job_of(env)))

            return run.run(
                run_dir, config, RankEnv.from_mapping(env), stop,
                open_run=open_run, secret=Secret.from_mapping(env), beat=heartbeat(env),
            )  # fmt: skip
        except TrainkitError as error:
            print(error, file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from None
