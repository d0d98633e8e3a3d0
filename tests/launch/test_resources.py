"""GPUs as a site wants them asked for, and the memory and CPUs that belong to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.loading import Loaded
from trainkit.errors import RefusedError, UserError
from trainkit.launch.plan import Plan, make_plan
from trainkit.site.profile import Node, Partition, Site

RUN = Path("/runs/ddp-0001")
Load = Callable[..., Loaded]

A100 = Node("g1", cpus=64, gpus=4, mem_mb=512000, gpu_types=("a100",))
V100 = Node("v1", cpus=40, gpus=8, mem_mb=384000, gpu_types=("v100",))
SITE = Site("slurm", 0, 2, partitions=(Partition("gpu", (A100, replace(A100, name="g2"), V100), default=True),))
A100_ONLY = Site("slurm", 0, 2, partitions=(Partition("gpu", (A100, replace(A100, name="g2")), default=True),))


def directives(plan: Plan) -> dict[str, Any]:
    return {item.name: item.value for item in plan.directives}


def asks_for_gpus(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in directives(plan).items() if name.startswith("gpu") or name == "gres"}


# Dialects


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ({}, {"gpus-per-node": 4}),
        ({"gpu_type": "a100"}, {"gpus-per-node": "a100:4"}),
        ({"gpu_dialect": "gres"}, {"gres": "gpu:4"}),
        ({"gpu_dialect": "gres", "gpu_type": "a100"}, {"gres": "gpu:a100:4"}),
        ({"gpu_dialect": "gres", "gres": "nvme:1"}, {"gres": "gpu:4,nvme:1"}),
        ({"gpu_dialect": "gres", "gres": "gpu:a100:2", "gpus_per_node": "auto"}, {"gres": "gpu:a100:2"}),
        ({"gpu_dialect": "constraint", "constraint": "gpu"}, {}),
        ({"gpu_dialect": "constraint", "gpus_per_node": 0}, {}),
        ({"gpu_dialect": "gres", "gpus_per_node": 0, "gres": "nvme:1"}, {"gres": "nvme:1"}),
    ],
)
def test_gpus_are_asked_for_in_the_sites_dialect_and_in_no_other(
    loaded: Load, flags: dict[str, Any], asked: dict[str, Any]
) -> None:
    plan = make_plan(loaded(**{"gpus_per_node": 4, **flags}), A100_ONLY, RUN)
    assert asks_for_gpus(plan) == asked


@pytest.mark.parametrize(
    "sbatch",
    [{"gpus": "8"}, {"gpus-per-task": "1"}, {"gpus-per-socket": "2"}, {"gpus-per-node": "2"}, {"gres": "gpu:a100:2"}],
)
def test_gpus_asked_for_in_two_ways_are_refused(loaded: Load, sbatch: dict[str, str]) -> None:
    with pytest.raises(UserError, match="in two ways") as refused:
        make_plan(loaded(gpus_per_node=4, sbatch=sbatch), A100_ONLY, RUN)
    assert "--gpus-per-node N alone" in refused.value.fix


def test_a_further_gres_does_not_take_away_the_gpus_of_the_gres_dialect(loaded: Load) -> None:
    with pytest.raises(UserError, match="in two ways"):
        make_plan(loaded(gpus_per_node=4, gpu_dialect="gres", sbatch={"gres": "nvme:1"}), A100_ONLY, RUN)
    plan = make_plan(loaded(gpus_per_node=4, sbatch={"gres": "nvme:1"}), A100_ONLY, RUN)
    assert asks_for_gpus(plan) == {"gpus-per-node": 4, "gres": "nvme:1"}


def test_gpus_that_are_a_feature_need_their_number_and_the_constraint(loaded: Load) -> None:
    cray = Site("slurm", 0, 2, partitions=(Partition("normal", (Node("n1", 24, 0, features=("gpu",)),), default=True),))
    plan = make_plan(loaded(gpu_dialect="constraint", constraint="gpu", gpus_per_node=1, nodes=1), cray, RUN)
    assert (plan.gpus_per_node, asks_for_gpus(plan), directives(plan)["constraint"]) == (1, {}, "gpu")
    with pytest.raises(UserError, match="how many GPUs"):
        make_plan(loaded(gpu_dialect="constraint", constraint="gpu"), cray, RUN)
    with pytest.raises(UserError, match="needs the constraint"):
        make_plan(loaded(gpu_dialect="constraint", gpus_per_node=1), cray, RUN)


def test_only_nodes_with_gpus_of_that_type_count(loaded: Load) -> None:
    assert make_plan(loaded(gpu_type="v100"), SITE, RUN).gpus_per_node == 8
    with pytest.raises(RefusedError) as refused:
        make_plan(loaded(gpu_type="a10"), SITE, RUN)
    assert (refused.value.why, refused.value.fix) == ("Its nodes have: a100, v100.", "Did you mean 'a100'?")


# CPUs and memory


@pytest.mark.parametrize(("gpus", "cpus", "mem"), [(4, 16, "512000M"), (2, 16, "256000M"), (1, 16, "128000M")])
def test_memory_and_cpus_are_the_share_of_the_gpus_taken(loaded: Load, gpus: int, cpus: int, mem: str) -> None:
    found = directives(make_plan(loaded(gpus_per_node=gpus), A100_ONLY, RUN))
    assert (found["cpus-per-task"], found["mem"]) == (cpus, mem)


def test_the_share_is_that_of_the_poorest_node_that_may_run_it(loaded: Load) -> None:
    assert directives(make_plan(loaded(gpus_per_node=4), SITE, RUN))["mem"] == "192000M"
    assert directives(make_plan(loaded(gpus_per_node=4, gpu_type="a100"), SITE, RUN))["mem"] == "512000M"


def only(**changes: Any) -> Site:
    return replace(A100_ONLY, partitions=(replace(A100_ONLY.partitions[0], **changes),))


def test_memory_is_left_to_a_site_that_gives_it_by_its_own_rule(loaded: Load) -> None:
    assert "mem" not in directives(make_plan(loaded(), only(has_memory_default=True), RUN))
    assert "mem" not in directives(make_plan(loaded(gpus_per_node=0), A100_ONLY, RUN))
    assert "mem" not in directives(make_plan(loaded(sbatch={"mem-per-gpu": "64G"}), A100_ONLY, RUN))


def test_the_share_of_memory_keeps_within_what_one_job_may_have(loaded: Load) -> None:
    assert directives(make_plan(loaded(), only(max_mem_mb=120000), RUN))["mem"] == "120000M"


@pytest.mark.parametrize(
    ("mem", "fits"), [("500G", True), ("501G", False), ("1T", False), ("512000", True), ("0", True)]
)
def test_memory_that_no_node_has_is_refused(loaded: Load, mem: str, fits: bool) -> None:
    launch = loaded(mem=mem, nodes=2)
    if fits:
        assert directives(make_plan(launch, A100_ONLY, RUN))["mem"] == mem
        return
    with pytest.raises(RefusedError) as refused:
        make_plan(launch, A100_ONLY, RUN)
    assert (refused.value.fix, refused.value.key) == ("Use --mem 512000M, or another --partition.", "launch.mem")
    assert "flag --mem" in refused.value.what


def test_memory_is_that_of_as_many_nodes_as_are_asked_for(loaded: Load) -> None:
    assert directives(make_plan(loaded(mem="400G", nodes=2), SITE, RUN))["mem"] == "400G"
    with pytest.raises(RefusedError, match="on 3 nodes"):
        make_plan(loaded("train.global_batch_size=48", mem="400G", nodes=3), SITE, RUN)


def test_where_the_memory_of_some_nodes_is_not_known_none_is_refused(loaded: Load) -> None:
    site = only(nodes=(A100, replace(A100, name="g2", mem_mb=None)))
    assert directives(make_plan(loaded(mem="900G"), site, RUN))["mem"] == "900G"


def test_more_memory_than_one_job_may_have_is_refused(loaded: Load) -> None:
    with pytest.raises(RefusedError) as refused:
        make_plan(loaded(mem="200G"), only(max_mem_mb=120000), RUN)
    assert "A job may have 120000 MB" in refused.value.why


def test_more_cpus_than_a_node_has_are_refused(loaded: Load) -> None:
    with pytest.raises(RefusedError) as refused:
        make_plan(loaded(cpus_per_task=17), A100_ONLY, RUN)
    assert refused.value.fix == "Use --cpus-per-task 16, or another --partition."


def test_fewer_nodes_than_a_partition_gives_are_refused(loaded: Load) -> None:
    with pytest.raises(RefusedError) as refused:
        make_plan(loaded(nodes=1), only(min_nodes=2), RUN)
    assert "Use --nodes 2" in refused.value.fix


def test_a_partition_for_other_groups_is_refused(loaded: Load) -> None:
    site = replace(only(groups=("vision", "nlp")), user_groups=("users", "nlp"))
    make_plan(loaded(), site, RUN)
    with pytest.raises(RefusedError, match="is not for you"):
        make_plan(loaded(), replace(site, user_groups=("users",)), RUN)
    make_plan(loaded(), replace(site, user_groups=()), RUN)


# The way out


def test_where_nodes_have_no_internet_wandb_and_model_hubs_stay_offline(loaded: Load) -> None:
    plan = make_plan(loaded(internet=False, setup=("module load x",)), A100_ONLY, RUN)
    assert plan.setup == (
        'export WANDB_MODE="${WANDB_MODE:-offline}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"',
        "module load x",
    )
    assert [item.reason for item in plan.decisions if item.name == "internet"] == ["W&B and model hubs stay offline"]
    assert make_plan(loaded(), A100_ONLY, RUN).setup == ()
    assert make_plan(loaded(internet=False), Site("", 0, 2), RUN).setup == (), "this machine is no compute node"
