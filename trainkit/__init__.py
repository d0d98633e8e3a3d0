"""Train vision models on SLURM clusters, on machines without a scheduler, and with volunteers.

run = trainkit.submit("ddp", ["optim.lr=3e-4"], nodes=2)
run.wait()
trainkit.open("ddp-0001").metrics("val")
"""

from __future__ import annotations

from trainkit.common import imports

if imports.is_one_of_our_commands():  # before anything else is imported
    imports.installed_first()

TYPE_CHECKING = False  # `typing` could be a user's file until libraries come first
if TYPE_CHECKING:
    from typing import Any

    from trainkit.api import Run, compare, open, submit
    from trainkit.common.errors import UserError
    from trainkit.script.log_record import log
    from trainkit.worker import rank

__all__ = ["Run", "UserError", "compare", "log", "open", "rank", "submit"]


def __getattr__(name: str) -> Any:
    """Load `trainkit.api` on first use: ranks import this package too and do without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "log":  # a script calls it that needs no more of the kit
        from trainkit.script.log_record import log

        return log
    if name == "rank":
        from trainkit.worker import rank

        return rank
    from trainkit import api

    return getattr(api, name)
