"""The simulated accelerator ``sim``; whoever imports this module has it, and this module is ``torch.sim``.

Its operators are the CPU's on the same bytes, so its results are the CPU's to the last bit. All else is as on a GPU, or
stricter, and what is a silent mistake there is an error here:

- Tensors of two devices, or of the device and the host, do not mix.
- Memory ends (torch.OutOfMemoryError), and is NaN when it is fresh or freed.
- A copy with ``non_blocking`` between the device and pinned memory, or between devices, lies in the queue of the
  current stream until somebody waits for that stream; its target is NaN until then. So does what a collective gives.
- Two streams that access the same block of memory, one of them writing, without an event, a wait or a synchronization
  that orders them: RuntimeError "sim: stream race: ...".
- A child that was forked after the device was used cannot use it.

Variables of the environment, read when the module is imported:

- SIM_DEVICES: how many devices the machine has (2).
- CUDA_VISIBLE_DEVICES: which of them are visible, a list of indices that ends at the first that names none.
- SIM_MEMORY_MB: the memory of each (2048).
- SIM_FLOAT64: 0: the devices have no such numbers, as Apple's.
- SIM_LOST_AFTER: after so many operators and copies every further one, and every synchronization, fails (never).
- SIM_SEED: seed of what is random in time: how far the queue is at a question, which of several streams runs (0).
"""

import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from tests.accelerator.building import build, extension, why_not

__all__ = ["loaded", "why_not"]

_initialized = True  # torch.utils.checkpoint keeps the state of generators only then


def visible_devices() -> list[int]:
    """The devices of the machine that this process sees."""
    count = int(os.environ.get("SIM_DEVICES") or 2)
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return list(range(count))
    found: list[int] = []
    for entry in mask.split(","):
        if not entry.strip().isdecimal() or int(entry) >= count:
            break
        found.append(int(entry))
    return found


# What torch, torch.accelerator, FSDP, checkpointing and torch.random call.


def is_available() -> bool:
    return bool(_VISIBLE)


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return bool(_extension.in_child())


def device_count() -> int:
    return len(_VISIBLE)


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(which: Any) -> None:
    torch.accelerator.set_device_index(which)


def get_device_name(which: Any = None) -> str:
    return "Simulated accelerator"


def get_device_properties(which: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(), total_memory=_MEMORY, multi_processor_count=1)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _index(which: Any) -> int:
    if isinstance(which, (str, torch.device)):
        which = torch.device(which).index
    return current_device() if which is None or which < 0 else int(which)


class device:
    """Makes a device the current one, for the time of a ``with``."""

    def __init__(self, which: Any) -> None:
        self.index = _index(which)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        set_device(self.before)


# Streams and events.

Event = torch.Event


def Stream(which: Any = None, priority: int = 0, **given: Any) -> torch.Stream:
    return torch.Stream(torch.device("sim", _index(given.get("device", which))), priority=priority)


def stream(which: torch.Stream) -> torch.Stream:
    return which


def current_stream(which: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(which))


def set_stream(which: torch.Stream) -> None:
    torch.accelerator.set_stream(which)


def synchronize(which: Any = None) -> None:
    torch.accelerator.synchronize(_index(which))


# Memory.

empty_cache = torch.accelerator.empty_cache
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats


def mem_get_info(which: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(which))


# Random numbers.


def _generator(which: Any) -> torch.Generator:
    made: torch.Generator = _extension.default_generator(_index(which))
    return made


def get_rng_state(which: Any = "sim") -> torch.Tensor:
    return _generator(which).get_state()


def set_rng_state(state: torch.Tensor, which: Any = "sim") -> None:
    _generator(which).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator(None).initial_seed()


# Registration.


def _simccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return _extension.Simccl(dist.ProcessGroupGloo(store, rank, size, timeout))


def _load() -> Any:
    loader = importlib.machinery.ExtensionFileLoader("_sim", str(build()))
    spec = importlib.util.spec_from_loader("_sim", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _register() -> Any:
    made = _load()
    lost_after = int(os.environ.get("SIM_LOST_AFTER") or -1)
    has_float64 = os.environ.get("SIM_FLOAT64") != "0"
    made.start(len(_VISIBLE), _MEMORY, lost_after, int(os.environ.get("SIM_SEED") or 0), has_float64)
    backend_registration.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _simccl, devices=["sim"])
    return made


def loaded() -> None:
    """Do nothing: torch imports this module for its entry point and calls it, and the import has done all."""


def main() -> None:
    how = "cached" if extension().exists() else ""
    began = time.monotonic()
    build()
    how = how or f"built in {time.monotonic() - began:.0f} s"
    print(f"sim: {len(visible_devices())} devices, {how}")


if __name__ == "__main__":
    main()
else:
    _VISIBLE = visible_devices()
    _MEMORY = int(os.environ.get("SIM_MEMORY_MB") or 2048) << 20
    _extension = _register()
