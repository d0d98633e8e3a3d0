"""The commands: ``python -m jobs.VERB``, one file a verb."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

# Without the environment activated, this is the system's Python, which may be any Python 3. Keep this part readable to
# an old one.
_home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
# Where Python was told not to look into the current folder, as by a job, nothing of that folder is imported.
_here = [] if getattr(sys.flags, "safe_path", False) else [os.getcwd()]
_found = PathFinder.find_spec("trainkit", _here)
if _found is not None and _found.origin is None:  # a folder without an __init__.py, which an installed package precedes
    _found = importlib.util.find_spec("trainkit")
_place = (_found.origin or next(iter(_found.submodule_search_locations or ()), "")) if _found is not None else ""
if _place and os.path.realpath(_place).replace("__init__.py", "").rstrip(os.sep) != os.path.join(_home, "trainkit"):
    print(
        f"{_place} would be imported in place of trainkit's own package.",
        f"  why: This command is from the environment of {_home}, and Python searches the current folder first.",
        "  fix: Rename it; or use the environment of that clone, if it is one; or run the command in another folder.",
        sep="\n",
        file=sys.stderr,
    )
    raise SystemExit(2)

if sys.version_info >= (3, 11):  # noqa: UP036  an older one gets the message below
    import trainkit  # noqa: F401  puts libraries before files of the current folder

import shlex  # noqa: E402
from pathlib import Path  # noqa: E402

if importlib.util.find_spec("pydantic") is None:
    _activate = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "activate"
    _install = "In the clone's folder: python3 -m venv .venv && .venv/bin/pip install -e . && source .venv/bin/activate"
    print(
        "This Python does not have what trainkit needs.",
        f"  why: {sys.executable} ({sys.version.split()[0]}) has no pydantic; is trainkit's environment active?",
        f"  fix: {f'source {shlex.quote(str(_activate))}' if _activate.is_file() else _install}",
        sep="\n",
        file=sys.stderr,
    )
    raise SystemExit(3)
