from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.config.loading import Loaded, Source, load
from trainkit.launch.plan import config_rows, make_plan, plan_rows
from trainkit.launch.resources import Decision
from trainkit.schedulers.base import named
from trainkit.schedulers.slurm_submission import way_out
from trainkit.site.profile import Site

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
    plan = make_plan(loaded(nodes=2, ntasks_per_node=2), Site("", 0, 2), RUN)
    _, *lines = named("local").preview(plan, RUN).splitlines()
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


# sbatch's words, as slurm_errno.c of SLURM 22.05 and its plugins have them
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("Invalid account or account/partition combination specified", "--partition main (environment P)"),
        ("Invalid qos specification", "--qos long (cluster profile site.yaml:2)"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "--time 9:00:00 (flag --time)"),
        ("Invalid feature specification", "--constraint fast (flag --constraint)"),
        (
            "Requested node configuration is not available",
            "--constraint fast (flag --constraint), --mem 9G (flag --mem)",
        ),
        ("Memory specification can not be satisfied", "--mem 9G (flag --mem)"),
        ("More processors requested than permitted", "--nodes 1 (default), --ntasks-per-node 1 (default)"),
        ("CPU count per node can not be satisfied", "--nodes 1 (default), --ntasks-per-node 1 (default)"),
        ("Invalid generic resource (gres) specification", "--gres tape:1 (flag --gres)"),
        ("Requested reservation is invalid", "--reservation mine (flag --reservation)"),
        ("Access denied to requested reservation", "--reservation mine (flag --reservation)"),
        ("Job dependency problem", "--dependency afterok:7 (flag --dependency)"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "--time 9:00:00"),
        ("Invalid partition name specified", "--partition main (environment P)"),
        ("User's group not permitted to use this partition", "--partition main (environment P)"),
        ("Required partition not available (inactive or drain)", "--partition main (environment P)"),
        ("Invalid node name specified", "--exclude n9 (flag --exclude)"),
        ("Invalid license specification", "--licenses x (flag --sbatch)"),
        ("sbatch: error: Invalid --mem specification", "--mem 9G (flag --mem)"),
        ("sbatch: unrecognized option '--bogus=1'", "--bogus 1 (flag --sbatch)"),
    ],
)
def test_what_sbatch_refuses_is_told_by_the_flag_and_who_has_said_it(words: str, change: str) -> None:
    directives = [
        Decision("partition", "main", Source("environment", "P")),
        Decision("qos", "long", Source("cluster profile", "site.yaml:2")),
        Decision("nodes", 1, Source("default")),
        Decision("ntasks-per-node", 1, Source("default")),
        *(Decision(name, text, Source("flag", f"--{name}")) for name, text in (
            ("time", "9:00:00"), ("constraint", "fast"), ("mem", "9G"), ("gres", "tape:1"), ("reservation", "mine"),
            ("dependency", "afterok:7"), ("exclude", "n9"),
        )),
        *(Decision(name, text, Source("flag", "--sbatch")) for name, text in (("licenses", "x"), ("bogus", "1"))),
    ]  # fmt: skip
    plan = make_plan(load("ddp"), Site("", 0, 2), RUN)
    fix = way_out(f"error: Batch job submission failed: {words}", replace(plan, directives=tuple(directives)))
    assert change in fix.partition(" `")[0]


def test_an_account_that_nobody_gave_is_asked_for() -> None:
    plan = make_plan(load("ddp"), Site("", 0, 2), RUN)
    assert "No --account is given" in way_out("Invalid account or account/partition combination specified", plan)


@pytest.mark.parametrize("words", ["Unspecified error", "job_submit/lua: ask the helpdesk"])
def test_words_that_name_no_flag_are_no_reason_to_change_one(words: str) -> None:
    plan = make_plan(load("ddp"), Site("", 0, 2), RUN)
    assert way_out(words, plan).startswith("`--dry-run` shows")
