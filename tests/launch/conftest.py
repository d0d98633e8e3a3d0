"""Shared by these tests: a folder of their own, a cluster, configurations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import fake_command, local_run, rank_function  # noqa: F401
from trainkit.cluster.site import ComputeNode, Partition, Site
from trainkit.config.loading import Loaded, load


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts in a folder of its own."""
    monkeypatch.chdir(tmp_path)


FOUR_NODES = tuple(ComputeNode(f"g{i}", 8, 4) for i in range(4))
GPU_SITE = Site(
    "slurm", 0, 2,
    partitions=(
        Partition("gpu", FOUR_NODES, default=True, max_time_min=120, max_nodes=2),
        Partition("mixed", tuple(ComputeNode(f"m{count}", 32, count) for count in (2, 4, 8))),
        Partition("cpu", (ComputeNode("c1", 16, 0), ComputeNode("c2", 16, 0))),
    ),
)  # fmt: skip
"""A cluster: `gpu` (4 nodes of 4 GPUs, 8 CPUs; 2 h and 2 nodes a job), `mixed` (2, 4, 8 GPUs), `cpu`."""


@pytest.fixture
def loaded() -> Callable[..., Loaded]:
    """The configuration of preset ``ddp`` with overrides; keyword arguments are resource flags."""

    def make(*overrides: str, preset: str = "ddp", **flags: Any) -> Loaded:
        settings = {f"launch.{key}": (value, "--" + key.replace("_", "-")) for key, value in flags.items()}
        return load(preset, overrides, flags=settings)

    return make
