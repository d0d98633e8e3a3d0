"""``python -m tests.swarm.elsewhen SECONDS jobs.VERB ...``: a command on a machine whose clock is off."""

import sys
import time
from importlib import import_module

from jobs import cli


def main() -> None:
    """Move the clock of this process, and of those that it forks, and run the command."""
    right, seconds = time.time, float(sys.argv[1])
    time.time = lambda: right() + seconds
    sys.argv = sys.argv[2:]
    cli.run(import_module(sys.argv[0]).main)


if __name__ == "__main__":
    main()
