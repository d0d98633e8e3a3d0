"""``python -m tests.swarm.elsewhen SECONDS[@FILE] jobs.VERB ...``: a command on a machine whose clock is off, or is set
once there is that file."""

import os
import sys
import time
from importlib import import_module

from jobs import cli


def main() -> None:
    """Move the clock of this process, and of those that it forks, and run the command."""
    right, (seconds, _, file) = time.time, sys.argv[1].partition("@")
    time.time = lambda: right() + float(seconds) * (not file or os.path.exists(file))
    sys.argv = sys.argv[2:]
    cli.run(import_module(sys.argv[0]).main)


if __name__ == "__main__":
    main()
