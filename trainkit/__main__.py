"""``trainkit VERB``, and ``python -m trainkit VERB``: the commands of `jobs`, from a folder that has its own ``jobs``.

``python -m jobs.VERB`` is the same wherever no other package is called ``jobs``: there Python takes that one before any
line of ours has run.
"""

import os
import runpy
import sys
from importlib import util

from trainkit.common import imports

imports.installed_first()  # before anything else is imported


def main() -> None:
    """Run the typed command and exit with its code."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # for the user's modules, as with `python -m`
    _load_jobs()
    from trainkit.common import terminal

    terminal.PROGRAM = "trainkit "
    runpy.run_module("jobs", run_name="__main__", alter_sys=False)


def _load_jobs() -> None:
    """Import the `jobs` beside this package, whichever the module path has."""
    spec = util.spec_from_file_location("jobs", os.path.join(imports.PROGRAM, "jobs", "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    jobs = util.module_from_spec(spec)
    sys.modules.setdefault("jobs", jobs)
    spec.loader.exec_module(jobs)


if __name__ == "__main__":
    main()
