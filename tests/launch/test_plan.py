from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.loading import Loaded, Source, load
from trainkit.config.slurm_options import slurm_time
from trainkit.errors import RefusedError, UserError
from trainkit.launch.plan import Plan, config_rows, make_plan, plan_rows, require_container, require_environment
from trainkit.schedulers.base import named
from trainkit.site.profile import Site, SiteFacts

RUN = Path("/runs/ddp-0001")
LAPTOP = Site(scheduler="", gpus=0, cpus=2)
FOUR_GPUS = Site(scheduler="", gpus=4, cpus=8)
Load = Callable[..., Loaded]


def value(plan: Plan, name: str) -> Any:
    return next(item.value for item in plan.decisions if item.name == name)


def said(plan: Plan, name: str) -> str:
    item = next(item for item in [*plan.decisions, *plan.directives] if item.name == name)
    return f"{item.source} | {item.reason}"


def directives(plan: Plan) -> dict[str, Any]:
    return {item.name: item.value for item in plan.directives}


def test_without_slurm_it_is_local_and_says_why(loaded: Load) -> None:
    plan = make_plan(loaded(nodes=2), LAPTOP, RUN)
    assert (plan.executor, plan.world_size, plan.directives) == ("local", 2, ())
    assert "no SLURM" in said(plan, "executor")
    assert "simulated" in said(plan, "nodes")


def test_with_slurm_it_is_slurm_unless_another_executor_is_asked_for(loaded: Load, gpu_site: Site) -> None:
    assert make_plan(loaded(), gpu_site, RUN).executor == "slurm"
    assert make_plan(loaded(executor="local"), gpu_site, RUN).executor == "local"


def test_gpus_are_those_of_the_partitions_nodes_and_ranks_one_for_each(loaded: Load, gpu_site: Site) -> None:
    plan = make_plan(loaded(nodes=2), gpu_site, RUN)
    assert (plan.gpus_per_node, plan.ntasks_per_node, plan.world_size) == (4, 4, 8)
    assert said(plan, "gpus_per_node") == "discovered partition gpu | what its nodes have"


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 4), (3, 2)])
def test_in_a_mixed_partition_auto_takes_what_so_many_nodes_all_have(
    loaded: Load, gpu_site: Site, nodes: int, gpus: int
) -> None:
    assert (
        make_plan(loaded("train.global_batch_size=48", nodes=nodes, partition="mixed"), gpu_site, RUN).gpus_per_node
        == gpus
    )


def test_cpus_per_task_are_the_share_of_the_gpus_taken(loaded: Load, gpu_site: Site) -> None:
    assert directives(make_plan(loaded(gpus_per_node=2), gpu_site, RUN))["cpus-per-task"] == 2


def test_cpus_per_task_are_left_to_the_site_on_the_cpu(loaded: Load, gpu_site: Site) -> None:
    plan = make_plan(loaded(gpus_per_node=0, ntasks_per_node=2), gpu_site, RUN)
    assert "cpus-per-task" not in directives(plan)
    assert "left to the site" in said(plan, "cpus_per_task")


def test_single_is_one_process_on_one_gpu(loaded: Load, gpu_site: Site) -> None:
    plan = make_plan(loaded(preset="single"), gpu_site, RUN)
    assert (plan.world_size, plan.gpus_per_node) == (1, 1)


def test_sharding_within_nodes_that_have_one_rank_each_is_refused(loaded: Load, gpu_site: Site) -> None:
    with pytest.raises(UserError, match=r"node does not go with launch.nodes=2 and launch.ntasks_per_node=1"):
        make_plan(loaded("strategy.shard_within=node", preset="fsdp", nodes=2, ntasks_per_node=1), gpu_site, RUN)
    assert make_plan(loaded(preset="hsdp", nodes=2, ntasks_per_node=2), gpu_site, RUN).world_size == 4
    assert make_plan(loaded(preset="hsdp", nodes=1, ntasks_per_node=1), LAPTOP, RUN).world_size == 1


@pytest.mark.parametrize(("preset", "flags"), [("single", {"nodes": 2}), ("dp", {"ntasks_per_node": 2})])
def test_a_strategy_of_one_process_is_not_planned_for_more(loaded: Load, preset: str, flags: dict[str, int]) -> None:
    (name, count), *_ = flags.items()
    with pytest.raises(UserError) as refused:
        make_plan(loaded(preset=preset, **flags), LAPTOP, RUN)
    assert refused.value.what == f"strategy.name={preset} cannot run with launch.{name}={count}."
    assert (f"flag --{name.replace('_', '-')}" in refused.value.why, refused.value.key) == (True, f"launch.{name}")


def test_a_strategy_of_the_users_own_says_itself_what_it_takes(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "my_strategy.py").write_text('RANKS = "one"\nGPUS_PER_RANK = "all"\ndef build(dist): ...\n')
    plan = make_plan(loaded("strategy.name=my_strategy:build"), FOUR_GPUS, RUN)
    assert (plan.world_size, plan.gpus_per_node) == (1, 4)
    (tmp_path / "my_peers.py").write_text('LOOP = "collaborative"\ndef build(dist): ...\n')
    plan = make_plan(loaded("strategy.name=my_peers:build", ntasks_per_node=3, gpus_per_node=0), LAPTOP, RUN)
    assert value(plan, "micro_batch_size") == 64


def test_dp_is_one_process_on_all_gpus_of_the_node(loaded: Load, gpu_site: Site) -> None:
    plan = make_plan(loaded(preset="dp"), gpu_site, RUN)
    assert (plan.world_size, plan.gpus_per_node, plan.cpus_per_task) == (1, 4, 8)


def test_a_local_run_takes_the_gpus_that_are_here(loaded: Load) -> None:
    assert make_plan(loaded(), FOUR_GPUS, RUN).world_size == 4


def test_simulated_nodes_share_the_gpus_that_are_here(loaded: Load) -> None:
    plan = make_plan(loaded(nodes=2), FOUR_GPUS, RUN)
    assert (plan.gpus_per_node, plan.world_size) == (2, 4)


def test_debug_is_rank_0_of_1_whatever_was_asked_for(loaded: Load) -> None:
    plan = make_plan(loaded(executor="debug", nodes=2, ntasks_per_node=2), LAPTOP, RUN)
    assert plan.world_size == 1
    assert "not 2 nodes" in said(plan, "nodes")


@pytest.mark.parametrize(
    ("size", "micro", "fix"),
    [(100, None, "96 or 104"), (3, None, "8"), (64, 16, "128"), (200, 8, "192 or 256")],
)
def test_a_batch_that_does_not_divide_is_answered_with_the_nearest_that_do(
    loaded: Load, gpu_site: Site, size: int, micro: int | None, fix: str
) -> None:
    overrides = [f"train.global_batch_size={size}"] + ([f"train.micro_batch_size={micro}"] if micro else [])
    with pytest.raises(UserError) as error:
        make_plan(loaded(*overrides, nodes=2), gpu_site, RUN)
    assert f"train.global_batch_size={fix}," in error.value.fix


def test_accumulation_follows_from_the_two_batch_sizes(loaded: Load) -> None:
    plan = make_plan(loaded("train.micro_batch_size=8", nodes=2), LAPTOP, RUN)
    assert (value(plan, "micro_batch_size"), value(plan, "grad_accum_steps")) == (8, 4)


def test_every_peer_of_a_swarm_has_batches_of_its_own(loaded: Load) -> None:
    assert make_plan(loaded(preset="hivemind", nodes=3), LAPTOP, RUN).world_size == 3


def test_gpus_where_there_are_none_are_refused_with_a_way_out(loaded: Load) -> None:
    with pytest.raises(RefusedError) as error:
        make_plan(loaded(nodes=2, gpus_per_node=4), LAPTOP, RUN)
    assert "--gpus-per-node 0" in error.value.fix
    assert "ddp_sim" in error.value.fix
    with pytest.raises(RefusedError):
        make_plan(loaded(gres="gpu:2"), LAPTOP, RUN)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"partition": "gpuu"}, "Did you mean 'gpu'?"),
        ({"nodes": 3}, "Use --nodes 2"),
        ({"nodes": 4, "partition": "mixed"}, "Use --nodes 3"),
        ({"time": "99:00:00"}, "Use --time 2:00:00"),
        ({"gpus_per_node": 8}, "Use --gpus-per-node 4"),
        ({"gpus_per_node": 1, "partition": "cpu"}, "--gpus-per-node 0"),
        ({"gpus_per_node": 8, "nodes": 2, "partition": "mixed"}, "Use --gpus-per-node 4"),
        ({"gpus_per_node": 2, "ntasks_per_node": 4}, "Use --ntasks-per-node 2"),
    ],
)
def test_what_the_site_cannot_give_is_refused_with_what_it_can(
    loaded: Load, gpu_site: Site, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(RefusedError) as error:
        make_plan(loaded(**flags), gpu_site, RUN)
    assert words in error.value.fix


def test_a_partition_that_takes_no_jobs_is_refused(loaded: Load, gpu_site: Site) -> None:
    closed = replace(gpu_site, partitions=(replace(gpu_site.partitions[0], up=False),))
    with pytest.raises(RefusedError, match="takes no jobs"):
        make_plan(loaded(), closed, RUN)


def test_a_short_partition_shortens_the_default_time_but_no_other(loaded: Load, gpu_site: Site) -> None:
    short = replace(gpu_site, partitions=(replace(gpu_site.partitions[0], max_time_min=30),))
    plan = make_plan(loaded(), short, RUN)
    assert (directives(plan)["time"], plan.time_limit_seconds) == ("30:00", 1800)
    assert said(plan, "time").startswith("discovered")


def test_a_site_that_does_not_tell_is_not_checked_and_that_is_said(loaded: Load) -> None:
    plan = make_plan(loaded(partition="any", nodes=32, gpus_per_node=2), Site("slurm", 0, 2, unknown="down"), RUN)
    assert "not checked: down" in said(plan, "partition")


def test_gres_replaces_gpus_per_node_and_never_joins_it(loaded: Load, gpu_site: Site) -> None:
    plan = make_plan(loaded(gres="gpu:a100:2"), gpu_site, RUN)
    assert directives(plan)["gres"] == "gpu:a100:2"
    assert "gpus-per-node" not in directives(plan)
    assert plan.ntasks_per_node == 2


def test_other_generic_resources_do_not_hide_the_gpus(loaded: Load, gpu_site: Site) -> None:
    plan = make_plan(loaded(gres="nvme:1", gpus_per_node=2), gpu_site, RUN)
    assert (directives(plan)["gres"], directives(plan)["gpus-per-node"]) == ("nvme:1", 2)


def test_the_signal_goes_to_the_ranks_and_comes_early_enough(loaded: Load, gpu_site: Site) -> None:
    assert directives(make_plan(loaded(), gpu_site, RUN))["signal"] == "USR2@90"
    assert directives(make_plan(loaded(time="1"), gpu_site, RUN))["signal"] == "USR2@20"


def test_a_sweep_is_an_array_whose_runs_log_into_their_own_folders(loaded: Load, gpu_site: Site) -> None:
    plan = make_plan(loaded(), gpu_site, Path("/runs/100%-0001"), points=3)
    assert directives(plan)["array"] == "0-2"
    assert directives(plan)["output"] == "/runs/100%%-0001/%a/logs/batch.out"


def test_further_sbatch_options_stand_beside_ours(loaded: Load, gpu_site: Site) -> None:
    plan = make_plan(loaded(sbatch={"comment": "thesis", "open-mode": "append", "exclusive": ""}), gpu_site, RUN)
    names = [item.name for item in plan.directives]
    assert names.count("open-mode") == 1
    assert (directives(plan)["open-mode"], directives(plan)["exclusive"]) == ("append", None)


@pytest.mark.parametrize(
    ("program", "option", "words"),
    [
        ("sbatch", "array=0-3", "--sweep"),
        ("sbatch", "a=0-3", "--sweep"),
        ("sbatch", "signal=USR1@9", "launch.signal_seconds"),
        ("sbatch", "no-requeue", "launch.requeue"),
        ("sbatch", "no_requeue", "launch.requeue"),
        ("sbatch", "req", "launch.requeue"),
        ("sbatch", "output=x", "logs of ranks"),
        ("sbatch", "o=x", "logs of ranks"),
        ("sbatch", "outp=x", "logs of ranks"),
        ("sbatch", "error=x", "logs of ranks"),
        ("sbatch", "open-mode=truncate", "logs of ranks"),
        ("sbatch", "chdir=/", "folder of its submission"),
        ("sbatch", "D=/", "folder of its submission"),
        ("sbatch", "job-name=x", "--job-name"),
        ("sbatch", "wrap=true", "calls it by itself"),
        ("sbatch", "parsable", "calls it by itself"),
        ("sbatch", "test-only", "--dry-run"),
        ("sbatch", "W", "--wait"),
        ("sbatch", "ntasks=7", "--ntasks-per-node"),
        ("sbatch", "n=7", "--ntasks-per-node"),
        ("sbatch", "t=9", "--time"),
        ("sbatch", "clusters=other", "cluster of this machine"),
        ("sbatch", "uid=somebody", "submitter's"),
        ("sbatch", "no-kill", "node that is gone"),
        ("srun", "output=x", "logs of ranks"),
        ("srun", "l", "logs of ranks"),
        ("srun", "kill-on-bad-exit=0", "ends the others"),
        ("srun", "K=0", "ends the others"),
        ("srun", "ntasks=1", "--ntasks-per-node"),
        ("srun", "export=NONE", "where they meet"),
        ("srun", "r=1", "started together"),
        ("srun", "wait=5", "end by themselves"),
        ("srun", "time=1", "--time"),
    ],
)
def test_an_option_that_breaks_what_a_run_relies_on_is_refused(
    loaded: Load, gpu_site: Site, program: str, option: str, words: str
) -> None:
    """In each spelling that sbatch and srun take; the error says which promise it breaks, or our flag for it."""
    key, _, value = option.partition("=")
    with pytest.raises(UserError) as caught:
        make_plan(loaded(**{program: {key: value}}), gpu_site, RUN)
    assert words in f"{caught.value.why} {caught.value.fix}"
    assert f"(flag --{program})" in caught.value.what


@pytest.mark.parametrize(
    ("program", "option"),
    [
        *(("sbatch", name) for name in ("kill-on-invalid-dep=yes", "hold", "nice=5", "licenses=x", "exclusive=user")),
        *(
            ("sbatch", name)
            for name in ("begin=now+1hour", "a-site's-own=1", "export=NONE", "mem-per-cpu=1G", "tmp=9G")
        ),
        *(("srun", name) for name in ("mpi=pmix", "cpu-bind=cores", "mem=0", "export=ALL,A=1", "exact", "overlap")),
    ],
)
def test_every_other_option_is_passed_on(loaded: Load, gpu_site: Site, program: str, option: str) -> None:
    key, _, value = option.replace("'s", "s").partition("=")
    plan = make_plan(loaded(**{program: {key: value}}), gpu_site, RUN)
    assert directives(plan)[key] == (value or None) if program == "sbatch" else dict(plan.srun)[key] == value


def test_precedence_is_flag_environment_file_profile_site_default(tmp_path: Path, gpu_site: Site) -> None:
    preset, profile = tmp_path / "mine.yaml", tmp_path / "site.yaml"
    preset.write_text("extends: ddp\nlaunch: {qos: file, account: file}\n")
    profile.write_text("launch: {qos: profile, account: profile, partition: mixed, constraint: profile}\n")
    env = {"SBATCH_ACCOUNT": "environment", "SBATCH_PARTITION": "environment"}
    flags = {"launch.partition": ("cpu", "--partition"), "launch.cluster": (str(profile), "--cluster")}
    plan = make_plan(load(str(preset), env=env, flags=flags), gpu_site, RUN)
    found = {item.name: (item.value, item.source.kind) for item in plan.directives}
    assert found["partition"] == ("cpu", "flag")
    assert found["account"] == ("environment", "environment")
    assert found["qos"] == ("file", "file")
    assert found["constraint"] == ("profile", "cluster profile")
    assert found["time"] == ("1:00:00", "default")


def test_the_plan_is_written_with_sources_and_reasons(loaded: Load, gpu_site: Site) -> None:
    plan = json.loads(make_plan(loaded(nodes=2), gpu_site, RUN).to_json())
    assert (plan["world_size"], plan["lead_seconds"]) == (8, 90)
    nodes = next(item for item in plan["directives"] if item["name"] == "nodes")
    assert (nodes["value"], nodes["source"]) == (2, "flag --nodes")


def test_a_plan_read_back_is_the_plan_that_was_written(loaded: Load, gpu_site: Site, tmp_path: Path) -> None:
    profile, file = tmp_path / "a site.yaml", tmp_path / "plan.json"
    profile.write_text("launch: {qos: long, sbatch: {comment: thesis}, srun: {mpi: pmix}, setup: [module load x]}\n")
    plan = make_plan(loaded("train.micro_batch_size=4", nodes=2, cluster=str(profile)), gpu_site, RUN, points=2)
    file.write_text(plan.to_json())
    assert Plan.read(file) == plan
    assert {type(item.source) for item in (*plan.decisions, *plan.directives)} == {Source}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text[: len(text) // 2], "line"),
        (lambda text: "[]", "list"),
        (lambda text: "[" * 10**5, "nested"),
        (lambda text: text.replace('"nodes": 2', '"nodes": "two"'), "nodes"),
        (lambda text: text.replace('"nodes": 2', '"nodes": 0'), "nodes"),
        (lambda text: text.replace('"executor": "slurm"', '"executor": "os.system"'), "executor"),
        (lambda text: text.replace('"decisions"', '"settings"'), "decisions"),
        (lambda text: text.replace('"flag --nodes"', "3"), "string"),
    ],
)  # fmt: skip
def test_a_foreign_or_damaged_plan_is_refused_by_its_name(
    loaded: Load, gpu_site: Site, change: Callable[[str], str], why: str
) -> None:
    text = make_plan(loaded(nodes=2), gpu_site, RUN).to_json()
    with pytest.raises(UserError) as refused:
        Plan.from_json(change(text), where="runs/x/plan.json")
    assert refused.value.what == "runs/x/plan.json is not a launch plan, or is damaged."
    assert why in refused.value.why
    assert refused.value.fix == "Submit the run anew: python -m jobs.submit runs/x"


def test_a_plan_that_is_not_there_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot read"):
        Plan.read(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("minutes", "text"), [(30, "30:00"), (120, "2:00:00"), (2160, "1-12:00:00"), (0.5, "00:30"), (1440, "1-0:00:00")]
)
def test_times_are_written_as_sbatch_reads_them(minutes: float, text: str) -> None:
    assert slurm_time(minutes) == text


def test_a_micro_batch_that_is_to_be_found_is_shown_as_auto(loaded: Load) -> None:
    plan = make_plan(loaded("train.micro_batch_size=auto", nodes=2), LAPTOP, RUN)
    assert (value(plan, "micro_batch_size"), value(plan, "grad_accum_steps")) == ("auto", "auto")


def test_a_static_graph_that_would_accumulate_is_refused(loaded: Load) -> None:
    settings = ("strategy.static_graph=true", "train.global_batch_size=64", "train.micro_batch_size=16")
    make_plan(loaded(*settings, nodes=1, ntasks_per_node=4), LAPTOP, RUN)
    with pytest.raises(UserError, match="static_graph=true does not go with grad_accum_steps=2"):
        make_plan(loaded(*settings, nodes=1, ntasks_per_node=2), LAPTOP, RUN)


# In words


def test_every_directive_and_every_setting_is_explained(loaded: Load, gpu_site: Site) -> None:
    configuration = loaded("optim.lr=1e-4", nodes=2)
    plan = make_plan(configuration, gpu_site, RUN)
    rows = {row[0]: row for row in plan_rows(plan) + config_rows(configuration)}
    assert {f"#SBATCH --{item.name}" for item in plan.directives} <= set(rows)
    assert rows["optim.lr"][1:3] == ("0.0001", "override optim.lr=1e-4")
    assert rows["train.max_steps"][1:3] == ("-", "default")
    assert rows["seed"][1] == "0"
    assert all(source for _, _, source, _ in rows.values())


def test_a_local_run_is_explained_by_one_command_a_rank(loaded: Load) -> None:
    plan = make_plan(loaded(nodes=2, ntasks_per_node=2), LAPTOP, RUN)
    _, *lines = named("local").preview(plan, RUN).splitlines()
    assert len(lines) == 4
    assert "SUBMITIT_LOCAL_NODEID=1 SUBMITIT_LOCAL_LOCALID=0 SUBMITIT_LOCAL_GLOBALID=2" in lines[2]


@pytest.mark.parametrize(
    ("override", "samples"),
    [("train.micro_batch_size=8", "one pass of one rank"), ("strategy.sync_batchnorm=true", "all ranks' passes")],
)
def test_a_plan_says_over_which_samples_batchnorm_takes_its_statistics(
    loaded: Load, gpu_site: Site, override: str, samples: str
) -> None:
    rows = {row[0]: row for row in plan_rows(make_plan(loaded(override), gpu_site, RUN))}
    assert rows["launch.micro_batch_size"][3].endswith(f"; BatchNorm's statistics are those of {samples}")


# What the script of a job would look for in vain


@pytest.mark.parametrize(
    ("environment", "there", "fix"),
    [
        ("venv:env", [], "python3 -m venv"),
        ("venv:env", ["pyvenv.cfg"], "python3 -m venv"),
        ("uv:env", ["main.py"], "uv init"),
    ],
)
def test_a_missing_environment_is_refused_with_the_command_that_makes_it(
    loaded: Load, tmp_path: Path, environment: str, there: list[str], fix: str
) -> None:
    (tmp_path / "env").mkdir()
    for name in there:
        (tmp_path / "env" / name).touch()
    with pytest.raises(RefusedError) as error:
        require_environment(loaded(environment=environment), tmp_path)
    assert error.value.what.startswith(f"{tmp_path}/env is no environment of {environment.partition(':')[0]} (")
    assert fix in error.value.fix


def test_an_environment_may_be_of_a_python_that_only_the_nodes_have(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to("/apps/python/3.12/bin/python3")
    require_environment(loaded(environment="venv:env"), tmp_path)
    require_environment(loaded(environment="conda:vision"), tmp_path)
    require_environment(loaded(), tmp_path)


def test_a_missing_image_is_refused_and_a_name_in_a_registry_is_not(
    loaded: Load, gpu_site: Site, tmp_path: Path
) -> None:
    def require(image: str) -> None:
        config = loaded(container_image=image)
        container = make_plan(config, gpu_site, tmp_path / "run").container
        assert container is not None
        require_container(config, container, SiteFacts(containers=("pyxis",)), named("slurm"))

    for image in ("nowhere.sif", "nowhere.sqsh", "./sandbox", f"{tmp_path}/nowhere"):
        with pytest.raises(RefusedError, match="There is no image /"):
            require(image)
    (tmp_path / "nowhere.sif").touch()
    for image in ("nowhere.sif", "docker://python:3.12", "nvcr.io#nvidia/pytorch:25.01-py3", "ubuntu"):
        require(image)


def test_pyxis_is_given_the_whole_path_of_an_image_file(loaded: Load, gpu_site: Site, tmp_path: Path) -> None:
    container = make_plan(loaded(container_image="torch.sqsh"), gpu_site, tmp_path / "run").container
    assert container is not None
    assert container.image == f"{tmp_path}/torch.sqsh"


@pytest.mark.parametrize(
    ("srun", "containers", "fits"),
    [
        ("echo '--container-image=[USER@]IMAGE [pyxis] the image to use'", (), True),
        ("echo '--container  Path to OCI container bundle'", (), False),
        ("echo '--container  Path to OCI container bundle'", ("pyxis",), True),
        ("exit 1", ("apptainer",), True),
    ],
)
def test_a_container_of_pyxis_is_refused_where_srun_does_not_know_it(
    loaded: Load, gpu_site: Site, fake_command: Callable[..., Any], srun: str, containers: tuple[str, ...], fits: bool
) -> None:
    fake_command("srun", srun)
    config = loaded(container_image="ubuntu")
    container = make_plan(config, gpu_site, Path("run")).container
    assert container is not None
    if fits:
        require_container(config, container, SiteFacts(containers=containers), named("slurm"))
    else:
        with pytest.raises(RefusedError, match="srun has no option --container-image here"):
            require_container(config, container, SiteFacts(containers=containers), named("slurm"))
