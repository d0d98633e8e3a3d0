"""The plan of a launch, and its refusals before anything is queued."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import GPU_SITE
from trainkit.cluster.plan import Plan, Side
from trainkit.cluster.scheduler import named
from trainkit.cluster.site import ComputeNode, Partition, Site
from trainkit.cluster.site_profile import SiteFacts
from trainkit.common import terminal
from trainkit.common.errors import RefusedError, TrainkitError, UserError
from trainkit.config.loading import Loaded, load
from trainkit.launch.planning import config_rows, make_plan, plan_rows, sides
from trainkit.launch.validation import require_container, require_environment, validate

RUN = Path("/runs/100%-0001")
LAPTOP = Site(scheduler="", gpus=0, cpus=2)
FOUR_GPUS = Site(scheduler="", gpus=4, cpus=8)
A100 = ComputeNode("g1", cpus=64, gpus=4, mem_mb=512000, gpu_types=("a100",))
V100 = ComputeNode("v1", cpus=40, gpus=8, mem_mb=384000, gpu_types=("v100",))
TWO_TYPES = Site("slurm", 0, 2, partitions=(Partition("gpu", (A100, replace(A100, name="g2"), V100), default=True),))
A100_ONLY = Site("slurm", 0, 2, partitions=(Partition("gpu", (A100, replace(A100, name="g2")), default=True),))
CRAY = Site(
    "slurm", 0, 2, partitions=(Partition("normal", (ComputeNode("n1", 24, 0, features=("gpu",)),), default=True),)
)
OFFLINE = 'export WANDB_MODE="${WANDB_MODE:-offline}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"'
Load = Callable[..., Loaded]


def of_first(site: Site, **changes: Any) -> Site:
    """The site, its first partition changed."""
    return replace(site, partitions=(replace(site.partitions[0], **changes),))


CLOSED = of_first(GPU_SITE, up=False)
SHORT = of_first(GPU_SITE, max_time_min=30)
SILENT = Site("slurm", 0, 2, unknown="down")
PARTLY_KNOWN = of_first(A100_ONLY, nodes=(A100, replace(A100, name="g2", mem_mb=None)))
LIMITED = of_first(A100_ONLY, max_mem_mb=120000)
SHARED = of_first(A100_ONLY, nodes=(replace(A100, shares={"mps": 0, "shard": 4}),))


def directives(plan: Plan) -> dict[str, Any]:
    return {item.name: item.value for item in plan.directives}


def said(plan: Plan, name: str) -> str:
    item = next(item for item in [*plan.decisions, *plan.directives] if item.name == name)
    return f"{item.value} | {item.source} | {item.reason}"


def gpus_asked(given: dict[str, Any], **asked: Any) -> tuple[Site, dict[str, Any], dict[str, Any]]:
    """A row of the table below: in which words, and in no others, four GPUs are asked for."""
    words = {"gpus-per-node": None, "gres": None, **{name.replace("_", "-"): value for name, value in asked.items()}}
    return A100_ONLY, {"gpus_per_node": 4, **given}, {f"#{name}": value for name, value in words.items()}


@pytest.mark.parametrize(
    ("site", "given", "expected"),
    [
        # Where it runs
        (LAPTOP, {"nodes": 2}, {"executor": "local", "world_size": 2, "directives": (),
                                "?executor": "there is no SLURM", "?nodes": "2 nodes are simulated"}),
        (GPU_SITE, {}, {"executor": "slurm", "#signal": "USR2@90"}),
        (LAPTOP, {"executor": "debug", "nodes": 2, "ntasks_per_node": 2}, {"world_size": 1, "?nodes": "not 2 nodes"}),
        (SILENT, {"partition": "any", "nodes": 32, "gpus_per_node": 2}, {"?partition": "not checked: down"}),
        # Ranks and GPUs
        (GPU_SITE, {"nodes": 2}, {"ntasks_per_node": 4, "world_size": 8,
                                  "?gpus_per_node": "4 | discovered partition gpu | what its nodes have"}),
        (GPU_SITE, {"nodes": 1, "partition": "mixed"}, {"gpus_per_node": 8}),
        (GPU_SITE, {"nodes": 2, "partition": "mixed"}, {"gpus_per_node": 4}),
        (TWO_TYPES, {"gpu_type": "v100"}, {"gpus_per_node": 8}),
        (GPU_SITE, {"preset": "single"}, {"world_size": 1, "gpus_per_node": 1}),
        (GPU_SITE, {"preset": "dp"}, {"world_size": 1, "gpus_per_node": 4, "cpus_per_task": 8}),
        (FOUR_GPUS, {"nodes": 2}, {"gpus_per_node": 2, "world_size": 4}),
        (GPU_SITE, {"gres": "gpu:a100:2"}, {"#gres": "gpu:a100:2", "#gpus-per-node": None, "ntasks_per_node": 2}),
        (GPU_SITE, {"gres": "shard:2", "cpus_per_task": 1},
         {"#gres": "shard:2", "#gpus-per-node": None, "gpus_per_node": 1, "world_size": 1}),
        gpus_asked({}, gpus_per_node=4),
        gpus_asked({"gpu_type": "a100"}, gpus_per_node="a100:4"),
        gpus_asked({"gpu_dialect": "gres"}, gres="gpu:4"),
        gpus_asked({"gpu_dialect": "gres", "gres": "nvme:1"}, gres="gpu:4,nvme:1"),
        gpus_asked({"gpu_dialect": "gres", "gres": "gpu:a100:2", "gpus_per_node": "auto"}, gres="gpu:a100:2"),
        gpus_asked({"gpu_dialect": "constraint", "gpus_per_node": 0}),
        gpus_asked({"sbatch": {"gres": "nvme:1"}}, gpus_per_node=4, gres="nvme:1"),
        (CRAY, {"gpu_dialect": "constraint", "constraint": "gpu", "gpus_per_node": 1, "nodes": 1},
         {"gpus_per_node": 1, "#gpus-per-node": None, "#constraint": "gpu"}),
        # Runs that share a GPU
        (SHARED, {"runs_per_gpu": 2, "gres": "nvme:1"},
         {"#gres": "shard:2,nvme:1", "#gpus-per-node": None, "gpus_per_node": 1, "world_size": 1, "#cpus-per-task": 8,
          "#mem": "64000M", "?gres": "a GPU has 4, for 2 runs"}),
        (of_first(SHARED, nodes=(replace(A100, shares={"mps": 100, "shard": 4}),)), {"runs_per_gpu": 3},
         {"#gres": "mps:33", "#cpus-per-task": 5}),
        (FOUR_GPUS, {"runs_per_gpu": 2}, {"gpus_per_node": 1, "world_size": 1, "?runs_per_gpu": "side by side"}),
        (LAPTOP, {"runs_per_gpu": 2}, {"gpus_per_node": 0, "world_size": 1}),
        # CPUs and memory
        (GPU_SITE, {"gpus_per_node": 2}, {"#cpus-per-task": 2}),
        (GPU_SITE, {"gpus_per_node": 0, "ntasks_per_node": 2}, {"?cpus_per_task": "left to the site"}),
        (A100_ONLY, {"gpus_per_node": 2}, {"#cpus-per-task": 16, "#mem": "256000M"}),
        (TWO_TYPES, {"gpus_per_node": 4}, {"#mem": "192000M"}),
        (of_first(A100_ONLY, has_memory_default=True), {}, {"#mem": None}),
        (A100_ONLY, {"sbatch": {"mem-per-gpu": "64G"}}, {"#mem": None}),
        (LIMITED, {}, {"#mem": "120000M"}),
        (A100_ONLY, {"mem": "500G", "nodes": 2}, {"#mem": "500G"}),
        (PARTLY_KNOWN, {"mem": "900G"}, {"#mem": "900G"}),
        # Batches
        (LAPTOP, {"set": ("train.micro_batch_size=8",), "nodes": 2}, {"?grad_accum_steps": "4 |"}),
        (GPU_SITE, {"set": ("train.micro_batch_size=8",)}, {"?micro_batch_size": "are those of one pass of one rank"}),
        (GPU_SITE, {"set": ("strategy.sync_batchnorm=true",)}, {"?micro_batch_size": "are those of all ranks' passes"}),
        (LAPTOP, {"set": ("strategy.static_graph=true", "train.micro_batch_size=16"), "ntasks_per_node": 4},
         {"world_size": 4}),
        # Time, and what else sbatch is told
        (SHORT, {}, {"#time": "30:00", "time_limit_seconds": 1800, "?time": "discovered"}),
        (GPU_SITE, {"time": "1"}, {"#signal": "USR2@20"}),
        (GPU_SITE, {"points": 3}, {"#array": "0-2", "#output": "/runs/100%%-0001/%a/logs/batch.out"}),
        (GPU_SITE, {"sbatch": {"comment": "thesis", "open-mode": "append", "exclusive": ""}},
         {"#comment": "thesis", "#open-mode": "append", "?exclusive": "None | flag --sbatch"}),
        (A100_ONLY, {"internet": False}, {"?internet": "W&B and model hubs stay offline"}),
        (A100_ONLY, {"internet": False, "setup": ("module load x",)}, {"setup": (OFFLINE, "module load x")}),
        (LAPTOP, {"internet": False}, {"setup": ()}),  # this machine is no compute node
    ],
)  # fmt: skip
def test_what_is_planned(loaded: Load, site: Site, given: dict[str, Any], expected: dict[str, Any]) -> None:
    """``name``: a field of the plan; ``#name``: a directive, None if there is none; ``?name``: what is said of it."""
    points = given.get("points", 1)
    flags = {key: value for key, value in given.items() if key not in ("set", "points")}
    plan = make_plan(loaded(*given.get("set", ()), **flags), site, RUN, points=points)
    for key, value in expected.items():
        if key[0] == "?":
            assert value in said(plan, key[1:])
        else:
            assert (directives(plan).get(key[1:]) if key[0] == "#" else getattr(plan, key)) == value
    names = [item.name for item in plan.directives]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("site", "given", "kind", "words"),
    [
        (GPU_SITE, {"partition": "gpuu"}, RefusedError, "Did you mean 'gpu'?"),
        (GPU_SITE, {"nodes": 3}, RefusedError, "Use --nodes 2"),
        (GPU_SITE, {"nodes": 4, "partition": "mixed"}, RefusedError, "Use --nodes 3"),
        (of_first(A100_ONLY, min_nodes=2), {"nodes": 1}, RefusedError, "Use --nodes 2"),
        (GPU_SITE, {"time": "99:00:00"}, RefusedError, "Use --time 2:00:00"),
        (GPU_SITE, {"gpus_per_node": 8}, RefusedError, "Use --gpus-per-node 4"),
        (GPU_SITE, {"gpus_per_node": 1, "partition": "cpu"}, RefusedError, "--gpus-per-node 0"),
        (GPU_SITE, {"gpus_per_node": 2, "ntasks_per_node": 4}, RefusedError, "Use --ntasks-per-node 2"),
        (LAPTOP, {"nodes": 2, "gpus_per_node": 4}, RefusedError, "Use --gpus-per-node 0 or the preset ddp_sim"),
        (LAPTOP, {"gres": "gpu:2"}, RefusedError, "2 GPUs were requested"),
        (CLOSED, {}, RefusedError, "accepts no jobs"),
        (TWO_TYPES, {"gpu_type": "a10"}, RefusedError, "Its nodes have: a100, v100.\n  fix: Did you mean 'a100'?"),
        (A100_ONLY, {"mem": "501G"}, RefusedError, "Use --mem 512000M, or another --partition."),
        (TWO_TYPES, {"set": ("train.global_batch_size=48",), "mem": "400G", "nodes": 3}, RefusedError, "384000 MB"),
        (LIMITED, {"mem": "200G"}, RefusedError, "at most 120000 MB each"),
        (A100_ONLY, {"cpus_per_task": 17}, RefusedError, "Use --cpus-per-task 16, or another --partition."),
        (A100_ONLY, {"cpus_per_task": 2, "ntasks_per_node": 65, "gpus_per_node": 0,
                     "set": ("train.global_batch_size=65",)}, RefusedError, "1 with --ntasks-per-node 64, or"),
        (A100_ONLY, {"gpus_per_node": 4, "sbatch": {"gpus-per-task": "1"}}, UserError, "in two ways"),
        (A100_ONLY, {"gpus_per_node": 4, "sbatch": {"gres": "gpu:a100:2"}}, UserError, "--gpus-per-node N alone"),
        (A100_ONLY, {"gpus_per_node": 4, "gpu_dialect": "gres", "sbatch": {"gres": "nvme:1"}}, UserError,
         "in two ways"),
        (CRAY, {"gpu_dialect": "constraint", "constraint": "gpu"}, UserError, "number of GPUs"),
        (GPU_SITE, {"nodes": 2, "spare_nodes": 1}, RefusedError, "Use fewer --spare-nodes, --nodes 1, or"),
        (LAPTOP, {"spare_nodes": 1}, UserError, "--spare-nodes is for jobs of SLURM"),
        (LAPTOP, {"spare_nodes": 1, "executor": "debug"}, UserError, "The executor is debug"),
        (GPU_SITE, {"spare_nodes": 1, "preset": "hivemind"}, UserError, "A swarm has no spare nodes"),
        (GPU_SITE, {"spare_nodes": 1, "requeue": False}, UserError, "does not go with launch.requeue=false"),
        (SHARED, {"spare_nodes": 1, "runs_per_gpu": 2}, UserError, "does not go with launch.runs_per_gpu"),
        (A100_ONLY, {"runs_per_gpu": 2}, RefusedError, "has a script for such sites"),
        (SHARED, {"runs_per_gpu": 5}, RefusedError, "into 4 shares.\n  fix: Use 4 at most."),
        (SHARED, {"runs_per_gpu": 2, "gpus_per_node": 0}, RefusedError, "jobs share the CPUs of nodes"),
        (SHARED, {"runs_per_gpu": 2, "ntasks_per_node": 2}, RefusedError, "2 ranks per node cannot share 1 GPU"),
        (LAPTOP, {"runs_per_gpu": 2, "set": ("train.micro_batch_size=auto",)}, UserError, "need a batch size"),
        (CRAY, {"gpu_dialect": "constraint", "gpus_per_node": 1}, UserError, "needs the constraint"),
        (GPU_SITE, {"set": ("train.global_batch_size=3",), "nodes": 2}, UserError, "train.global_batch_size=8,"),
        (GPU_SITE, {"set": ("train.global_batch_size=200", "train.micro_batch_size=8"), "nodes": 2}, UserError,
         "train.global_batch_size=192 or 256,"),
        (LAPTOP, {"preset": "single", "nodes": 2}, UserError, "ranks=2 does not go with strategy.name=single."),
        (GPU_SITE, {"set": ("strategy.shard_within=node",), "preset": "fsdp", "nodes": 2, "ntasks_per_node": 1},
         UserError, "node does not go with launch.nodes=2 and launch.ntasks_per_node=1"),
        (LAPTOP, {"set": ("strategy.static_graph=true", "train.micro_batch_size=16"), "ntasks_per_node": 2},
         UserError, "static_graph=true does not go with grad_accum_steps=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_what_can(
    loaded: Load, site: Site, given: dict[str, Any], kind: type[TrainkitError], words: str
) -> None:
    flags = {key: value for key, value in given.items() if key != "set"}
    with pytest.raises(kind) as refused:
        make_plan(loaded(*given.get("set", ()), **flags), site, RUN)
    assert words in str(refused.value)
    assert refused.value.key


def test_runs_of_a_sweep_share_the_gpus_and_the_cpus_of_this_machine(loaded: Load) -> None:
    def shared(site: Site, runs: int, per_gpu: int = 2, **more: int) -> list[Side]:
        config = loaded(runs_per_gpu=per_gpu, **more)
        return sides(config.config.launch, make_plan(config, site, RUN), site, runs)

    assert shared(FOUR_GPUS, 20) == [Side(index, 8, index % 4) for index in range(8)]
    assert shared(FOUR_GPUS, 3) == [Side(0, 3, 0), Side(1, 3, 1), Side(2, 3, 2)]
    assert shared(FOUR_GPUS, 20, max_parallel=2) == [Side(0, 2, 0), Side(1, 2, 1)]
    assert shared(LAPTOP, 20) == [Side(0, 2, 0), Side(1, 2, 0)]
    assert shared(FOUR_GPUS, 20, per_gpu=1) == shared(SHARED, 20) == [Side()], "one job for all"


def test_a_strategy_of_the_users_own_says_itself_what_it_takes(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "my_strategy.py").write_text('RANKS = "one"\nGPUS_PER_RANK = "all"\ndef build(dist): ...\n')
    plan = make_plan(loaded("strategy.name=my_strategy:build"), FOUR_GPUS, RUN)
    assert (plan.world_size, plan.gpus_per_node) == (1, 4)
    (tmp_path / "my_peers.py").write_text('LOOP = "collaborative"\ndef build(dist): ...\n')
    plan = make_plan(loaded("strategy.name=my_peers:build", ntasks_per_node=3, gpus_per_node=0), LAPTOP, RUN)
    assert said(plan, "micro_batch_size").startswith("64 |")


MEANT = replace(LAPTOP, expected="SLURM_CONF")
UNCONFIGURED = replace(LAPTOP, unknown="sbatch is installed, but not configured for a cluster.")


@pytest.mark.parametrize(
    ("site", "words", "env", "named"),
    [
        (LAPTOP, ("--partition", "--account"), {}, "--partition, --account are for SLURM"),
        (LAPTOP, ("--dependency",), {}, "--dependency is for SLURM"),
        (LAPTOP, ("--cluster",), {}, "--cluster is for SLURM"),
        (LAPTOP, ("launch.modules=[cuda]",), {}, "launch.modules=[cuda] is for SLURM"),
        (LAPTOP, ("launch.sbatch.comment=x",), {}, "launch.sbatch.comment=x is for SLURM"),
        (LAPTOP, (), {"SBATCH_PARTITION": "gpu"}, "SBATCH_PARTITION is for SLURM"),
        (LAPTOP, (), {"SBATCH_TIMELIMIT": "30", "SBATCH_WCKEY": "x"}, "SBATCH_TIMELIMIT, SBATCH_WCKEY are for SLURM"),
        (LAPTOP, (), {"TRAINKIT_CLUSTER": "devcluster"}, "TRAINKIT_CLUSTER is for SLURM"),
        (MEANT, (), {}, "SLURM_CONF is for SLURM"),
        (UNCONFIGURED, ("--qos",), {}, "Set SLURM_CONF, or"),
    ],
)
def test_what_is_meant_for_slurm_does_not_train_on_a_machine_without(
    site: Site, words: tuple[str, ...], env: dict[str, str], named: str
) -> None:
    """It may be a login node. With --executor local it does."""
    values = {"--cluster": "devcluster"}
    flags = {f"launch.{word[2:]}": (values.get(word, "x"), word) for word in words if word.startswith("--")}
    overrides = [word for word in words if not word.startswith("--")]
    with pytest.raises(RefusedError) as caught:
        make_plan(load("ddp", overrides, flags=flags, env=env), site, RUN)
    assert named in str(caught.value)
    assert "add --executor local" in caught.value.fix
    asked = {**flags, "launch.executor": ("local", "--executor")}
    assert make_plan(load("ddp", overrides, flags=asked, env=env), site, RUN).executor == "local"


def test_a_preset_with_a_partition_trains_on_a_laptop_and_says_so(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("extends: ddp\nlaunch: {partition: gpu, time: '2:00:00', mem: 4G}\n")
    loaded = load(str(preset), flags={"launch.mem": ("8G", "--mem"), "launch.time": ("30", "--time")})
    plan = make_plan(loaded, LAPTOP, RUN)
    assert (plan.executor, plan.time_limit_seconds) == ("local", 1800)
    (note,) = validate(loaded, plan, LAPTOP, tmp_path, tmp_path)
    assert note == f"Note: {preset}: partition, --mem are for a scheduler, and without effect on this machine."
    assert validate(load("ddp"), plan, LAPTOP, tmp_path, tmp_path) == []
    in_a_job = load("ddp", env={"SLURM_HINT": "nomultithread"})  # SLURM sets such ones itself
    assert make_plan(in_a_job, LAPTOP, RUN).executor == "local"


@pytest.mark.parametrize(
    ("program", "option", "words"),
    [
        ("sbatch", "arr=0-3", "--sweep"), ("sbatch", "signal=USR1@9", "launch.signal_seconds"),
        ("sbatch", "no_requeue", "launch.requeue"), ("sbatch", "outp=x", "logs of ranks"),
        ("sbatch", "open-mode=truncate", "logs of ranks"), ("sbatch", "chdir=/", "folder of its submission"),
        ("sbatch", "wrap=true", "calls it by itself"), ("sbatch", "test-only", "--dry-run"),
        ("sbatch", "wait", "--wait"), ("sbatch", "ntasks=7", "--ntasks-per-node"),
        ("sbatch", "time=9", "--time"), ("sbatch", "clusters=other", "cluster of this machine"),
        ("sbatch", "uid=somebody", "submitter's"), ("sbatch", "no-kill", "node that is gone"),
        ("srun", "label", "logs of ranks"), ("srun", "kill-on-bad-exit=0", "ends the others"),
        ("srun", "export=NONE", "where they meet"), ("srun", "relative=1", "started together"),
        ("srun", "wait=5", "end by themselves"),
    ],
)  # fmt: skip
def test_an_option_that_breaks_what_runs_need_is_refused(loaded: Load, program: str, option: str, words: str) -> None:
    """In each spelling that sbatch and srun take; the error says which promise it breaks, or our flag for it."""
    key, _, value = option.partition("=")
    with pytest.raises(UserError) as caught:
        make_plan(loaded(**{program: {key: value}}), GPU_SITE, RUN)
    assert words in f"{caught.value.why} {caught.value.fix}"
    assert f"(flag --{program})" in caught.value.what


def test_every_other_option_is_passed_on(loaded: Load) -> None:
    options = {"kill-on-invalid-dep": "yes", "hold": "", "begin": "now+1hour", "export": "NONE", "a-sites-own": "1"}
    steps = {"mpi": "pmix", "mem": "0", "export": "ALL,A=1", "exact": ""}
    plan = make_plan(loaded(sbatch=options, srun=steps), GPU_SITE, RUN)
    assert directives(plan).items() >= {**options, "hold": None}.items()
    assert dict(plan.srun) == steps


def test_a_plan_read_back_is_the_plan_that_was_written(loaded: Load, tmp_path: Path) -> None:
    profile, file = tmp_path / "a site.yaml", tmp_path / "plan.json"
    profile.write_text("launch: {qos: long, sbatch: {comment: thesis}, srun: {mpi: pmix}, setup: [module load x]}\n")
    plan = make_plan(loaded(cluster=str(profile), nodes=2), GPU_SITE, RUN)
    file.write_text(plan.to_json())
    assert Plan.read(file) == plan
    written = json.loads(file.read_text())
    assert written["world_size"] == 8
    assert [item["source"] for item in written["directives"] if item["name"] == "nodes"] == ["flag --nodes"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text[: len(text) // 2], "line"),
        (lambda text: "[]", "list"),
        (lambda text: text.replace('"nodes": 2', '"nodes": 0'), "nodes"),
        (lambda text: text.replace('"executor": "slurm"', '"executor": "os.system"'), "executor"),
        (lambda text: text.replace('"decisions"', '"settings"'), "decisions"),
    ],
)
def test_a_foreign_or_damaged_plan_is_refused_by_its_name(
    loaded: Load, tmp_path: Path, change: Callable[[str], str], why: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(change(make_plan(loaded(nodes=2), GPU_SITE, RUN).to_json()))
    with pytest.raises(UserError) as refused:
        Plan.read(file)
    assert refused.value.what == f"{file} is not a launch plan, or is damaged."
    assert why in refused.value.why
    assert refused.value.fix == f"Submit the run again: {terminal.command('submit', tmp_path)}"
    with pytest.raises(UserError, match=r"no\.json is not a launch plan") as refused:
        Plan.read(tmp_path / "no.json")
    assert "No such file" in refused.value.why


# In words


def test_every_directive_and_every_setting_is_explained(loaded: Load) -> None:
    configuration = loaded("optim.lr=1e-4", nodes=2)
    plan = make_plan(configuration, GPU_SITE, RUN)
    rows = {row[0]: row for row in plan_rows(plan) + config_rows(configuration)}
    assert {f"#SBATCH --{item.name}" for item in plan.directives} <= set(rows)
    assert rows["optim.lr"][1:3] == ("0.0001", "override optim.lr=1e-4")
    assert rows["train.max_steps"][1:3] == ("-", "default")
    assert rows["seed"][1] == "0"
    assert all(source for _, _, source, _ in rows.values())


# What the script of a job would look for in vain


@pytest.mark.parametrize(
    ("environment", "there", "fix"),
    [("venv:env", ["pyvenv.cfg"], "python3 -m venv"), ("uv:env", ["main.py"], "uv init")],
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
    with pytest.raises(RefusedError):
        require_environment(loaded(environment="venv:env"), tmp_path)
    (tmp_path / "env" / "bin" / "python").symlink_to("/apps/python/3.12/bin/python3")
    require_environment(loaded(environment="venv:env"), tmp_path)
    require_environment(loaded(environment="conda:vision"), tmp_path)
    require_environment(loaded(), tmp_path)


def test_a_missing_image_is_refused_and_a_name_in_a_registry_is_not(loaded: Load, tmp_path: Path) -> None:
    def require(image: str) -> None:
        config = loaded(container_image=image)
        container = make_plan(config, GPU_SITE, tmp_path / "run").container
        assert container is not None
        require_container(config, container, SiteFacts(containers=("pyxis",)), named("slurm"))

    for image in ("nowhere.sif", "nowhere.sqsh", "./sandbox", f"{tmp_path}/nowhere"):
        with pytest.raises(RefusedError, match="There is no image /"):
            require(image)
    (tmp_path / "nowhere.sif").touch()
    for image in ("nowhere.sif", "docker://python:3.12", "nvcr.io#nvidia/pytorch:25.01-py3", "ubuntu"):
        require(image)


@pytest.mark.parametrize(
    ("srun", "containers", "fits"),
    [
        ("echo '--container-image=[USER@]IMAGE [pyxis] the image to use'", (), True),
        ("echo '--container  Path to OCI container bundle'", (), False),
        ("exit 1", ("apptainer",), True),
    ],
)
def test_a_container_of_pyxis_is_refused_where_srun_does_not_know_it(
    loaded: Load, fake_command: Callable[..., Any], srun: str, containers: tuple[str, ...], fits: bool
) -> None:
    fake_command("srun", srun)
    config = loaded(container_image="ubuntu")
    container = make_plan(config, GPU_SITE, Path("run")).container
    assert container is not None
    with nullcontext() if fits else pytest.raises(RefusedError, match="srun has no option --container-image here"):
        require_container(config, container, SiteFacts(containers=containers), named("slurm"))
