"""Train vision models on SLURM clusters, on machines without a scheduler, and with volunteers.

run = trainkit.submit("ddp", ["optim.lr=3e-4"], nodes=2)
run.wait()
trainkit.open("ddp-0001").metrics("val")
"""

from __future__ import annotations

from trainkit import importing

if importing.is_one_of_our_commands():  # before anything else is imported
    importing.installed_first()

TYPE_CHECKING = False  # a job imports this before it can tell libraries from files of the user's, `typing` included
if TYPE_CHECKING:
    from typing import Any

    from trainkit.interactive import Run, compare, open, submit

__all__ = ["Run", "compare", "open", "submit"]


def __getattr__(name: str) -> Any:
    """The face for notebooks and scripts is loaded by who asks for it: ranks import this package as well."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainkit import interactive

    return getattr(interactive, name)
