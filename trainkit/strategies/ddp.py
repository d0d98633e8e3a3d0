"""DistributedDataParallel: every rank holds the whole model; gradients are averaged while they are computed."""

from __future__ import annotations

from typing import Literal

from trainkit.distributed.process_group import Distributed
from trainkit.strategies.replicated import Replicated, hook_of


def build(
    dist: Distributed,
    precision: str = "fp32",
    *,
    bucket_cap_mb: int = 25,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none",
    powersgd_rank: int = 4,
    powersgd_start_step: int = 1000,
    sync_batchnorm: bool = False,
) -> Replicated:
    """Options: see `torch.nn.parallel.DistributedDataParallel`; ``sync_batchnorm`` needs GPUs.

    ``comm_hook``: what gradients travel as; the model computes as `train.precision` says. ``fp16`` and ``bf16`` halve
    the traffic and round each rank's gradients, fp16 to more digits of a smaller range. ``powersgd`` sends matrices of
    ``powersgd_rank`` columns, after ``powersgd_start_step`` exchanges of whole gradients, and adds what they leave out
    to the next ones; a rank keeps that for itself, as much as it has weights, and a checkpoint holds it for all ranks.
    """
    hook = hook_of(
        comm_hook,
        dist,
        precision,
        rank=powersgd_rank,
        start_step=powersgd_start_step,
        find_unused_parameters=find_unused_parameters,
    )
    return Replicated(dist, bucket_cap_mb, find_unused_parameters, static_graph, hook, sync_batchnorm)
