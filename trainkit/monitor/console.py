"""Progress for a person: a bar on a terminal, plain lines everywhere else (log files, pipes)."""

import sys

from trainkit.config.schema import Config
from trainkit.monitor.base import Logger, Start
from trainkit.monitor.log_tail import Lines, ProgressBar
from trainkit.run.folder import RunDir

PEERS = "none"  # a swarm has lines of its own, one a round


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """A progress bar if stdout is a terminal, else one line a record.

    The debug executor gets lines as well: a bar drawn over a debugger's prompt would help nobody.
    """
    if sys.stdout.isatty() and config.launch.executor != "debug":
        return ProgressBar(start.total_steps, start.metrics, resumed_step=start.resumed_step)
    return Lines(start.total_steps, start.metrics)
