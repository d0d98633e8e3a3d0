"""Train vision models on SLURM clusters, on machines without a scheduler, and with volunteers.

run = trainkit.submit("ddp", ["optim.lr=3e-4"], nodes=2)
run.wait()
trainkit.open("ddp-0001").metrics("val")
"""

from __future__ import annotations

from trainkit import importing

if importing.is_one_of_our_commands():  # before anything else is imported
    importing.installed_first()

TYPE_CHECKING = False  # `typing` could be a user's file until libraries come first
if TYPE_CHECKING:
    from typing import Any

    from trainkit.interactive import Run, compare, open, submit

__all__ = ["Run", "compare", "open", "submit"]


def __getattr__(name: str) -> Any:
    """Load `trainkit.interactive` on first use: ranks import this package too and do without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainkit import interactive

    return getattr(interactive, name)
