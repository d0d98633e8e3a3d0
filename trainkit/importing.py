"""Import libraries, and our own packages, before files of the same name in the user's folders.

Python looks into the current folder first, and a job into the snapshot of the code. A ``torch.py`` or ``yaml.py`` that
lies there would run in place of the library, and a folder ``jobs/`` in place of our commands. Other modules of the
user's are found as ever. `jobs` is always the package beside this one.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

# Whatever else were imported here would come from the current folder, if it has a file of that name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_PROGRAM = os.path.realpath(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OURS = ("jobs", "trainkit")
_STANDARD = {os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "lib-dynload")}
_FOLDERS: set[str] = set()
_PLACES: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}


class _InstalledFirst:
    """Answers for the names of installed libraries; leaves all others to the finders after it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not None:
            return None
        if name in OURS:
            return PathFinder.find_spec(name, [_PROGRAM])
        others, installed = _places()
        if name not in sys.stdlib_module_names and not _is_module(PathFinder.find_spec(name, installed)):
            return None
        # Not `installed`: a library of another place on PYTHONPATH still comes before the installed one.
        found = PathFinder.find_spec(name, others)
        return found if _is_module(found) else None


def installed_first(*folders: str) -> None:
    """Have this process import libraries before modules in the current folder, the program's own and ``folders``."""
    _FOLDERS.update(os.path.realpath(folder) for folder in (os.curdir, _PROGRAM, *folders))
    _PLACES.clear()
    if _InstalledFirst not in sys.meta_path:
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(place, _InstalledFirst)  # after what Python has built in


def namesake(module: str) -> str:
    """What in the current folder has the name of the package of ours that ``module`` is of; empty if nothing has."""
    first = module.partition(".")[0]
    for name in (first, f"{first}.py") if first in OURS else ():
        if os.path.exists(name) and os.path.realpath(name) != os.path.realpath(os.path.join(_PROGRAM, name)):
            return os.path.abspath(name)
    return ""


def leave(folder: str) -> None:
    """Take a folder, and all that is in it, off the module path, even if it is the current one."""
    top = os.path.realpath(folder)
    sys.path[:] = [entry for entry in sys.path if not f"{os.path.realpath(entry or os.curdir)}/".startswith(f"{top}/")]


def is_one_of_our_commands() -> bool:
    """Whether Python was started with ``-m jobs.VERB`` or ``-m trainkit.MODULE``, and not with a user's program."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return sys.argv[:1] == ["-m"] and module.partition(".")[0] in OURS  # while Python looks for that module


def is_installed_place(folder: str) -> bool:
    """Whether it is one of Python's own folders, or one that packages are installed into."""
    parts = folder.split(os.sep)
    return "site-packages" in parts or "dist-packages" in parts or folder in _STANDARD


def _places() -> tuple[list[str], list[str]]:
    """The module path without the user's folders, and what of it packages are installed into."""
    path = tuple(sys.path)
    if path not in _PLACES:
        others = [entry for entry in path if os.path.realpath(entry or os.curdir) not in _FOLDERS]
        _PLACES[path] = others, [entry for entry in others if is_installed_place(entry)]
    return _PLACES[path]


def _is_module(spec: ModuleSpec | None) -> bool:
    return spec is not None and spec.loader is not None  # a folder without __init__.py is no library
