"""The only file that imitates or patches other libraries.

An entry stands here while it gains over 10 % of something that a user waits for. It is left out where it raises, where
the library has another version than those that it was tried with, and where ``TRAINKIT_WORKAROUNDS=off`` is set:
everything works without it.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trainkit.process import is_set, set_variables

SWITCH = "TRAINKIT_WORKAROUNDS"


@dataclass(frozen=True)
class Workaround:
    """Something done to a library, until the library does without it."""

    apply: Callable[[], None]
    """Its docstring says what a user waits for, without it and with it, and where its developers discuss it."""
    library: str
    tried: tuple[str, str]
    """Lowest and newest version of the library that it was tried with, as ``major.minor``."""

    def __call__(self) -> bool:
        """Apply it; whether it is in force."""
        try:
            lowest, newest = map(_major_minor, self.tried)
            version = _major_minor(importlib.metadata.version(self.library))
            if is_set(SWITCH, to="off") or not lowest <= version <= newest:
                return False
            self.apply()
        except Exception:
            return False
        return True


def _major_minor(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


# torch imports its compiler for three things that matter only to those who compile: a mark in `Optimizer.step` that
# ends a trace, a wrapper around optimizers' and DDP's methods that keeps the compiler out of them, and the question
# whether it takes over DDP's exchange of gradients.


class _PutOff(ModuleType):
    """Stands for a module of the compiler until somebody asks for more than is known; then the compiler comes."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # asked by code that looks through all modules
            raise AttributeError(name)
        if isinstance(sys.modules.get("torch._dynamo"), _PutOff):
            del sys.modules["torch._dynamo"]
            vars(sys.modules["torch"]).pop("_dynamo", None)
        return getattr(importlib.import_module(self.__name__), name)


def _disable(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """torch's own functions are not compiled here; others may be."""
    if getattr(fn, "__module__", "").startswith(("torch.optim.", "torch.nn.parallel.")):
        return fn
    return _COMPILER.__getattr__("disable")(fn, *args, **kwargs)


_COMPILER = _PutOff(
    "torch._dynamo",
    graph_break=lambda msg="": None,  # nothing is traced, so there is nothing to break
    disable=_disable,
    utils=_PutOff("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),  # torch's default
    trace_rules=_PutOff("torch._dynamo.trace_rules", clear_lru_cache=lambda: None),
)


def _put_off_compiler() -> None:
    """460 updates of a small model take 5.2 s instead of 6.0; nothing where the model needs torchvision.

    https://github.com/pytorch/pytorch/pull/162595
    """
    import torch

    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = torch._dynamo = _COMPILER


put_off_torch_compiler = Workaround(_put_off_compiler, library="torch", tried=("2.14", "2.15"))


def _no_tensorflow() -> None:
    """460 updates of a small model take 8.3 s of CPU time instead of 13.2, where TensorFlow is installed.

    https://github.com/tensorflow/tensorboard/pull/1796
    """
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))  # TensorBoard's own mark of such a build


tensorboard_without_tensorflow = Workaround(_no_tensorflow, library="tensorboard", tried=("2.20", "2.21"))


# glibc gives free memory at the end of its heap back to the kernel, and takes it again as new pages: a thousand page
# faults an update of a small network, by chance of what lies at the end.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_IN_HEAP = 32 << 20  # the most that glibc takes
_ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def _keep_freed_memory() -> None:
    """A training of a small model on the CPU takes 5.2 s instead of 6.7.

    https://github.com/pytorch/pytorch/issues/41486
    """
    if not is_set(*_ALLOCATOR_VARIABLES):  # what the user says holds
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)  # setting one of the two lowers the other


keep_freed_memory = Workaround(_keep_freed_memory, library="torch", tried=("2.14", "2.15"))
"""For the memory that a training on the CPU frees, and needs again in its next update."""


# hivemind's packages import all of hivemind, and with it torch. Its modules that talk to a DHT need none of it: here
# the packages stand without their ``__init__``, and give the names that those modules ask for from where they are.

_HIVEMIND = ("hivemind", "hivemind.dht", "hivemind.utils")
_UTILS = {
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "logging": ("get_logger",),
    "timed_storage": ("get_dht_time", "DHTExpiration", "TimedStorage", "ValueWithExpiration"),
}


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        for module, names in _UTILS.items():
            if self.__name__ == "hivemind.utils" and name in names:
                return getattr(importlib.import_module(f"hivemind.utils.{module}"), name)
        raise AttributeError(f"{self.__name__}.{name} is left out here")


def _without_torch() -> None:
    """`swarm status` takes 0.8 s of CPU time instead of 2.9.

    https://github.com/learning-at-home/hivemind/pull/465
    """
    if "hivemind" in sys.modules:
        return
    set_variables({"HIVEMIND_LOGLEVEL": "CRITICAL"}, unless_set=True)  # its loggers print tracebacks for what is normal
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None
    for name in _HIVEMIND:
        package = _Package(name)
        package.__path__ = [str(Path(str(spec.origin)).parent.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


hivemind_without_torch = Workaround(_without_torch, library="hivemind", tried=("1.1", "1.1"))
"""For a process that only reads what a swarm publishes."""
