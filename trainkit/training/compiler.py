"""torch's compiler, imported when somebody compiles.

torch 2.6 to 2.15 import it, 1.5 s of CPU time for every rank, for three things that nobody notices who does not
compile: a mark in `Optimizer.step` that tells it to stop tracing there, a wrapper around optimizers' and DDP's methods
that keeps it out of them, and the question whether it takes over DDP's exchange of gradients. Here they are answered
without it.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from trainkit.fileio import make_own
from trainkit.run import folder as run_folder

_NAME, _CACHE = "torch._dynamo", "TORCHINDUCTOR_CACHE_DIR"
_OWN = ("torch.optim.", "torch.nn.parallel.")


def put_off() -> None:
    """Have the compiler imported no sooner than it is used for more than the above; for runs without
    ``train.compile``, whose own code may still compile."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = torch._dynamo = _Later(_NAME)


def use_own_cache() -> None:
    """Have compiled code kept where only this user can write, unless they say where.

    torch keeps it in a folder of /tmp whose name is known, and runs what is there, whoever has made that folder.
    """
    if not os.environ.get(_CACHE):
        node = Path(tempfile.gettempdir(), f"trainkit-{os.geteuid()}")
        folder = node if make_own(node) else run_folder.state_file("cache")
        os.environ[_CACHE] = str(folder / "torchinductor")


class _Later(ModuleType):
    """Stands where the compiler will be; whoever asks for anything else gets it from the compiler itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.utils = _Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # torch's default
        self.trace_rules = _Part("trace_rules", clear_lru_cache=lambda: None)

    def graph_break(self, msg: str = "") -> None:
        """Nothing is traced, so there is nothing to break."""

    def disable(self, fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Keep the compiler out of ``fn``: torch's own functions are not compiled here, others may be."""
        if getattr(fn, "__module__", "").startswith(_OWN):
            return fn
        return _compiler().disable(fn, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # of those who look through all modules
            raise AttributeError(name)
        return getattr(_compiler(), name)


class _Part:
    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_compiler(), self._name), name)


def _compiler() -> Any:
    if isinstance(sys.modules.get(_NAME), _Later):
        del sys.modules[_NAME]
        vars(torch).pop("_dynamo", None)
        use_own_cache()
    return importlib.import_module(_NAME)
