"""Train vision models on SLURM clusters, on machines without a scheduler, and with volunteers.

run = trainkit.submit("ddp", ["optim.lr=3e-4"], nodes=2)
run.wait()
trainkit.open("ddp-0001").metrics("val")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.interactive import Run, compare, open, submit

__all__ = ["Run", "compare", "open", "submit"]


def __getattr__(name: str) -> Any:
    """The face for notebooks and scripts is loaded by who asks for it: ranks import this package as well."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainkit import interactive

    return getattr(interactive, name)
