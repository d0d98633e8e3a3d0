"""``trainkit VERB``, and ``python -m trainkit VERB``: the commands of `jobs`, from a folder that has its own ``jobs``.

``python -m jobs.VERB`` is the same wherever no other package is called ``jobs``: there Python takes that one before any
line of ours has run.
"""

import os
import sys

from trainkit import importing

importing.installed_first()  # before anything else is imported


def main() -> None:
    """Run the typed command and exit with its code."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # for the user's modules, as with `python -m`
    from jobs import __main__ as commands
    from jobs import cli
    from trainkit import terminal

    terminal.PROGRAM = "trainkit "
    cli.run(commands.main)


if __name__ == "__main__":
    main()
