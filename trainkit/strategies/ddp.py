"""DistributedDataParallel: every rank holds the whole model; gradients are averaged while they are computed."""

from __future__ import annotations

from typing import Literal

from trainkit.distributed.process_group import Distributed
from trainkit.strategies.replicated import Replicated


def build(
    dist: Distributed,
    *,
    bucket_cap_mb: int = 25,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    comm_hook: Literal["none", "fp16", "bf16"] = "none",
    sync_batchnorm: bool = False,
) -> Replicated:
    """Options: see `torch.nn.parallel.DistributedDataParallel`; ``sync_batchnorm`` needs GPUs.

    ``comm_hook``: what gradients travel as; ``fp16`` and ``bf16`` halve the traffic and round each rank's gradients,
    fp16 to more digits of a smaller range. The model computes as `train.precision` says.
    """
    return Replicated(dist, bucket_cap_mb, find_unused_parameters, static_graph, comm_hook, sync_batchnorm)
