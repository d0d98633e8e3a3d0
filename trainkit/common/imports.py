"""Import libraries, and our own packages, before files of the same name in the user's folders.

Python looks into the current folder first, and a job into the snapshot of the code. A ``torch.py`` or ``yaml.py`` that
lies there would run in place of the library. Our commands and ranks look into these folders last.
"""

import os
import sys

# Whatever else were imported here would come from the current folder, if it has a file of that name.

PROGRAM = os.path.realpath(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
"""The folder that our packages are in: a clone, a run's snapshot, or ``site-packages``."""
OURS = ("jobs", "trainkit")


def installed_first(*folders: str) -> None:
    """Have this process look for modules in ``folders``, the current one and the program's own after all others."""
    last = {os.path.realpath(folder) for folder in (os.curdir, PROGRAM, *folders)}

    def is_last(entry: str) -> bool:
        return os.path.realpath(entry or os.curdir) in last and not is_installed_place(entry)

    sys.path.sort(key=is_last)  # others keep their order


def namesake(module: str) -> str:
    """Path in the current folder with the name of the package of ours that ``module`` is of; empty if there is none."""
    first = module.partition(".")[0]
    for name in (first, f"{first}.py"):
        is_other = os.path.realpath(name) != os.path.realpath(os.path.join(PROGRAM, name))
        if first in OURS and os.path.exists(name) and is_other:
            return os.path.abspath(name)
    return ""


def leave(folder: str) -> None:
    """Take a folder, and all that is in it, off the module path, even if it is the current one."""
    top = os.path.realpath(folder)
    sys.path[:] = [entry for entry in sys.path if not f"{os.path.realpath(entry or os.curdir)}/".startswith(f"{top}/")]


def is_one_of_our_commands() -> bool:
    """True while Python looks for the module of ``python -m jobs.VERB`` or ``python -m trainkit.MODULE``."""
    words = sys.orig_argv
    if sys.argv[:1] != ["-m"] or "-m" not in words[:-1]:
        return False
    return words[words.index("-m") + 1].partition(".")[0] in OURS


def is_installed_place(folder: str) -> bool:
    """True for one of Python's own folders, and for one that packages are installed into."""
    parts = folder.split(os.sep)
    standard = os.path.dirname(os.__file__)
    return "site-packages" in parts or "dist-packages" in parts or folder.startswith(standard)
