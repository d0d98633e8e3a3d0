"""What to change when memory has run out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from trainkit.config.checks import smaller, strategy_traits
from trainkit.config.schema import Config
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RunFailedError, TrainkitError
from trainkit.monitor.profiler import out_of_gpu_memory

_WORDS = (
    *("CUDA out of memory", "HIP out of memory", "CUDA error: out of memory", "CUDNN_STATUS_ALLOC_FAILED"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "std::bad_alloc"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that memory is too small: torch has a type of its own for the GPU's allocator only."""
    return isinstance(error, MemoryError) or out_of_gpu_memory(error) or any(words in str(error) for words in _WORDS)


@contextmanager
def memory_explained(config: Config, dist: Distributed) -> Iterator[None]:
    """Whoever runs out of memory in the body says what to change.

    Raises:
        RunFailedError: instead of torch's error.
    """
    try:
        yield
    except TrainkitError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        share = config.train.global_batch_size // dist.world_size
        given = config.train.micro_batch_size
        micro = given if isinstance(given, int) else share
        words = str(error).strip().splitlines()
        gpu = dist.device.type == "cuda"
        half = smaller(micro, share, even=config.augment.mixes)
        advice = [f"train.micro_batch_size={half} (the result stays the same) or auto"] if half else []
        advice += ["strategy.name=fsdp"] * (not strategy_traits(config.strategy.name).sharded)
        if config.train.activation_checkpointing != "full":
            advice += ["train.activation_checkpointing=full (for models of blocks)"]
        advice += [] if gpu else ["more memory for the job (--mem)"]
        who = f"Rank {dist.rank} on {socket.gethostname()}"
        raise RunFailedError(
            f"{who} ran out of {'GPU ' if gpu else ''}memory with micro batches of {micro}.",
            why=words[0] if words else type(error).__name__,
            fix=f"Use {', or '.join(advice)}.",
        ) from error
