from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.cluster.site import Site
from trainkit.config.loading import Loaded
from trainkit.launch.explain import config_rows, plan_rows, rank_commands
from trainkit.launch.plan import make_plan

RUN = Path("/runs/ddp-0001")


def test_every_directive_and_every_setting_is_explained(loaded: Callable[..., Loaded], gpu_site: Site) -> None:
    configuration = loaded("optim.lr=1e-4", nodes=2)
    plan = make_plan(configuration, gpu_site, RUN)
    rows = {row[0]: row for row in plan_rows(plan) + config_rows(configuration)}
    assert {f"#SBATCH --{item.name}" for item in plan.directives} <= set(rows)
    assert rows["optim.lr"][1:3] == ("0.0001", "override optim.lr=1e-4")
    assert rows["train.max_steps"][1:3] == ("-", "default")
    assert rows["seed"][1] == "0"
    assert all(source for _, _, source, _ in rows.values())


def test_a_local_run_is_explained_by_one_command_a_rank(loaded: Callable[..., Loaded]) -> None:
    plan = make_plan(loaded(nodes=2, ntasks_per_node=2), Site(False, 0, 2), RUN)
    lines = rank_commands(plan, RUN)
    assert len(lines) == 4
    assert "SUBMITIT_LOCAL_NODEID=1 SUBMITIT_LOCAL_LOCALID=0 SUBMITIT_LOCAL_GLOBALID=2" in lines[2]


@pytest.mark.parametrize(
    ("override", "samples"),
    [("train.micro_batch_size=8", "one pass of one rank"), ("strategy.sync_batchnorm=true", "all ranks' passes")],
)
def test_a_plan_says_over_which_samples_batchnorm_takes_its_statistics(
    loaded: Callable[..., Loaded], gpu_site: Site, override: str, samples: str
) -> None:
    rows = {row[0]: row for row in plan_rows(make_plan(loaded(override), gpu_site, RUN))}
    assert rows["launch.micro_batch_size"][3].endswith(f"; BatchNorm's statistics are those of {samples}")
