"""What trains: configuration + data + rank -> model, strategy and precision, on this rank's device."""

from __future__ import annotations

from torch import nn

from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.data.loader import placed as placed_data
from trainkit.data.loader import resolve_workers
from trainkit.distributed.device import cpus_of_rank, device_name, gpu_is_here, keep_freed_memory
from trainkit.distributed.process_group import Distributed
from trainkit.models import build_model, expected_input
from trainkit.models.freezing import freeze
from trainkit.strategies import build_strategy
from trainkit.strategies.base import TakesHollow
from trainkit.training.hollow import build_hollow, spread
from trainkit.training.layout import make_deterministic, placed, use_own_compiler_cache
from trainkit.training.o2 import O2, halve
from trainkit.training.parts import Parts
from trainkit.training.precision import Precision, choose_precision
from trainkit.training.timing import flops_per_image, peak_flops
from trainkit.workarounds import put_off_torch_compiler


def wants_gpu(config: Config) -> bool:
    """Train on GPU: there is one, and the configuration does not say zero.

    Raises RefusedError where GPUs are granted and none is seen.
    """
    return config.launch.gpus_per_node != 0 and gpu_is_here()


def build(config: Config, dist: Distributed, splits: Splits, *, model: nn.Module | None = None) -> Parts:
    """Everything that trains or evaluates, on this rank's device.

    Args:
        model: the plain model, where the caller had to have it before there was a device.
    """
    use_own_compiler_cache()
    if config.train.compile == "off":
        put_off_torch_compiler()
    make_deterministic(config.train.deterministic)
    if dist.device.type == "cpu":
        keep_freed_memory()
    name = choose_precision(config.train.precision, dist.device)
    precision = (O2 if name == "o2" else Precision)(name, dist)
    strategy = build_strategy(config.strategy, dist, name)
    plain = model or (
        build_hollow(config, splits.info)
        if isinstance(strategy, TakesHollow) and not dist.is_main
        else build_model(config.model, splits.info, config.seed)
    )
    splits = splits.prepared_for(expected_input(config.model, plain, splits.info))
    workers = resolve_workers(config.data.workers, splits, cpus_of_rank(dist.env))
    freeze(plain, config.model.freeze)
    known = peak_flops(device_name(dist.device), precision.name) is not None
    flops = flops_per_image(plain, splits.info.in_chans, splits.info.image_size) if known else None
    if isinstance(strategy, TakesHollow):
        model = spread(plain, strategy, config, dist)
    else:
        plain = placed(plain, config, dist.device)
        model = strategy.parallelize(halve(plain, dist) if name == "o2" else plain)
    return Parts(
        config=config,
        dist=dist,
        splits=placed_data(splits, config.data.device, dist.device, workers=workers),
        model=model,
        strategy=strategy,
        precision=precision,
        workers=workers,
        flops_per_image=flops,
    )


def alone(config: Config) -> Config:
    """``config`` for one process that holds the whole model."""
    return config.model_copy(update={"strategy": type(config.strategy)(name="single")})
