"""The commands: ``python -m jobs.VERB``, one file a verb."""

import sys

if sys.version_info >= (3, 10):  # noqa: UP036  an older one is told so below
    import trainkit  # noqa: F401  from here on libraries come before what lies in the current folder

import importlib.util
import shlex
from pathlib import Path

# Who has forgotten to activate the environment runs the system's Python, which may be any Python 3: no word of ours
# that is newer may come before this.
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
