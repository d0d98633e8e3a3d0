"""Commands that mend what failed."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.diagnosis.runs import CONFIG, TRACEBACK, diagnose
from trainkit.cluster.scheduler import JobState
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.data import DataInfo, Splits
from trainkit.data.registry import build_data
from trainkit.diagnosis.causes import cause_of
from trainkit.diagnosis.fixes import TO_FILL_IN, on_every_machine, settings_of
from trainkit.models import library
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.training.tasks.base import build_task

INFO = DataInfo("mine", 2, 1, 4, ("a", "b"), (0.5,), (0.25,))
LR = "optim:\n  lr: {}\n"


@pytest.mark.parametrize(
    ("config", "error", "command"),
    [
        (LR.format("4.0e-3"), "FloatingPointError: the loss is nan", " optim.lr=0.002 "),
        (LR.format("0.4"), "FloatingPointError: the loss is nan", " optim.lr=0.2 "),
        ("train:\n  global_batch_size: 50\n", "torch.OutOfMemoryError: CUDA out of memory.", "micro_batch_size=5"),
        ("", "FileNotFoundError: [Errno 2] No such file or directory: '/x; touch y'", " ls -ld '/x; touch y'"),
        ("", "OSError: x: Could not resolve hostname lic7: Name or service not known", " getent hosts lic7"),
    ],
    ids=["half the rate", "of a high one", "half of a rank's 25", "one word", "its name"],
)
def test_the_command_has_the_runs_numbers_and_the_messages_names(
    run: RunDir, config: str, error: str, command: str
) -> None:
    run.config.write_text(config)
    assert command in diagnose(run, rank=TRACEBACK.format(error)).command


@pytest.mark.parametrize(("asked", "given"), [("16G", " --mem 32G"), ("0", ""), (None, " --mem 0")])
def test_more_memory_is_twice_what_was_asked_for(run: RunDir, asked: str | None, given: str) -> None:
    run.plan.write_text(json.dumps({"directives": [{"name": "mem", "value": asked}] if asked is not None else []}))
    cause = diagnose(run, batch="srun: error: n2: task 1: Out Of Memory")
    assert cause.command == f"python -m jobs.resume {run.path}{given}"


def test_paths_in_a_command_are_quoted(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "my runs" / "ddp-0001", CONFIG)
    append_event(run, "submitted", executor="slurm", job_id="4711")
    cause = cause_of(run, JobState("NODE_FAIL", "4711", "slurm", "NodeDown", "n2"))
    assert cause is not None
    assert cause.command == f"python -m jobs.resume '{run.path}' --exclude n2"


@pytest.mark.parametrize("module", ["trainkit", "my_model", "utils", "torchvision_of_somebody"])
def test_nobody_is_told_to_install_a_package_that_may_be_a_strangers(run: RunDir, module: str) -> None:
    cause = diagnose(run, rank=f"ModuleNotFoundError: No module named '{module}'")
    assert cause.name == "missing-module"
    assert "pip" not in cause.command + cause.fix


def no_splits(root: Path) -> tuple[int, int]:
    """A user's own data function, which is to return Splits."""
    return 1, 2


def test_own_code_to_be_mended_is_submitted_anew(run: RunDir) -> None:
    data = load("single", [f"data.name={__name__}:no_splits"]).config.data
    with pytest.raises(UserError, match="returned no Splits") as said:
        build_data(data)
    assert diagnose(run, rank=str(said.value)).command == f"python -m jobs.submit {run.path}"


METRICS = {"hits": ("", "higher", "Hits")}
HEADLINE = "hits"


def nothing(given: object) -> None:
    """A user's own model or task, which is to return one."""


def build_own_model() -> None:
    library.build_model(load("single", [f"model.name={__name__}:nothing"]).config.model, INFO, seed=0)


def build_own_task() -> None:
    build_task(load("single", [f"task.name={__name__}:nothing"]).config, Splits(INFO, [], [], [], id, id))  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [build_own_model, build_own_task])
def test_a_model_or_task_to_be_mended_is_submitted_anew(run: RunDir, build: Callable[[], None]) -> None:
    """A resumed run would have the old copy of the code."""
    with pytest.raises(UserError, match=r"nothing returned no (model|Task)") as said:
        build()
    assert diagnose(run, rank=str(said.value)).command == f"python -m jobs.submit {run.path}"


def test_a_node_that_the_run_asks_for_by_name_is_not_excluded_as_well(run: RunDir) -> None:
    run.plan.write_text(json.dumps({"directives": [{"name": "nodelist", "value": "n[1-2]"}]}))
    cause = diagnose(run, "NODE_FAIL|NodeDown", batch="srun: error: Node failure on n2")
    assert (cause.command, "--nodelist" in cause.fix) == (f"python -m jobs.resume {run.path}", True)


def test_a_bench_is_not_said_to_go_on(run: RunDir) -> None:
    assert "jobs.resume" in diagnose(run, "CANCELLED|None").advice
    (run.path / "bench.json").write_text("{}")
    cause = diagnose(run, "CANCELLED|None")
    assert "jobs.resume" not in cause.advice
    assert f"jobs.bench --show {run.path}" in cause.advice


def test_what_the_ranks_of_all_nodes_say_blames_no_node(run: RunDir) -> None:
    words = TRACEBACK.format("RuntimeError: No CUDA GPUs are available")
    assert diagnose(run, rank=words).command.endswith(" --exclude n2"), "of one node it is told"
    (run.attempt_logs(0) / "rank-0.err").write_text(words)
    cause = diagnose(run, rank=words)
    assert (cause.name, cause.command) == ("cuda-sees-none", f"python -m jobs.resume {run.path}")
    assert cause.fix.startswith("Every node of the job says so")


@pytest.mark.parametrize(
    ("error", "place"),
    [
        ("OSError: [Errno 122] Disk quota exceeded: '{home}/.cache/matplotlib/f.json'", "{home}/.cache/matplotlib"),
        ("OSError: [Errno 28] No space left on device: '/tmp/torchinductor_me/x.cpp'", "/tmp/torchinductor_me"),
        ("PermissionError: [Errno 13] Permission denied: '/data/imagenet'", "/data/imagenet"),
        ("OSError: [Errno 28] No space left on device", "{run}"),
    ],
    ids=["a cache", "the node's disk", "the data", "nothing"],
)
def test_the_fix_looks_where_the_message_points(run: RunDir, error: str, place: str) -> None:
    known = {"home": str(Path.home()), "run": str(run.path.parent)}
    cause = diagnose(run, rank=TRACEBACK.format(error.format(**known)))
    assert re.search(rf"{re.escape(place.format(**known))}(/f\.json)?($|;| )", cause.command), cause.command


def test_of_a_job_of_this_machine_slurm_is_not_asked(run: RunDir) -> None:
    cause = cause_of(run, JobState("PENDING", "4711", "local", "waits"))
    assert cause is not None
    assert (cause.name, cause.command) == ("waits", f"python -m jobs.status {run.path}")


TYPED = ["python", "-m", "jobs.launch", "ddp", "--nodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.7"]


TYPED += ["--master-port", "29500", "--secret-file", "run.secret", "--run-dir", "runs/a"]


TYPED += ["train.epochs=2", "optim.lr=0.1"]


def launched(folder: Path, *, executor: str = "launch", nodes: int = 2) -> RunDir:
    run = RunDir.create(folder / "runs" / "my run", CONFIG)
    run.plan.write_text(json.dumps({"nodes": nodes}))
    run.manifest.write_text(json.dumps({"command": TYPED}))
    append_event(run, "submitted", executor=executor, job_id="4711")
    return run


@pytest.mark.parametrize("before", ["", "HF_HUB_OFFLINE=1 ", "env -u CUDA_VISIBLE_DEVICES ", "A=1 B='x y' "])
def test_each_machine_goes_on_or_starts_anew_with_what_was_typed(tmp_path: Path, before: str) -> None:
    run = launched(tmp_path)
    flags = "--nodes 2 --node-rank 1 --master-addr 10.0.0.7 --secret-file run.secret"
    resumed = on_every_machine(run, f"{before}python -m jobs.resume '{run.path}' --exclude n1")
    assert resumed == f"{before}python -m jobs.launch '{run.path}' {flags}"
    anew = on_every_machine(run, f"{before}python -m jobs.submit '{run.path}' train.micro_batch_size=4")
    assert anew == f"{before}python -m jobs.launch ddp train.epochs=2 optim.lr=0.1 {flags} train.micro_batch_size=4"


@pytest.mark.parametrize(("executor", "nodes", "manifest"), [
    ("launch", 1, None), ("local", 2, None), ("slurm", 2, None), ("launch", 2, "[]"), ("launch", 2, '{"command": 3}'),
])  # fmt: skip
def test_where_one_machine_starts_it_or_nobody_knows_the_command_stays(
    tmp_path: Path, executor: str, nodes: int, manifest: str | None
) -> None:
    run = launched(tmp_path, executor=executor, nodes=nodes)
    if manifest is not None:
        run.manifest.write_text(manifest)
    command = f"python -m jobs.resume '{run.path}'"
    assert on_every_machine(run, command) == command


@pytest.mark.parametrize(
    ("what", "fix", "changes"),
    [
        ("", "Use train.global_batch_size=96 or 128.", ["train.global_batch_size=96"]),
        ("", "Use train.precision=bf16, or strategy.comm_hook=fp16.", ["train.precision=bf16"]),
        ("", "Give optim.lr=5e-4 train.grad_clip_norm=1.0.", ["optim.lr=5e-4", "train.grad_clip_norm=1.0"]),
        ("", 'Use model.freeze=["blocks.[0-5].*"].', ['model.freeze=["blocks.[0-5].*"]']),
        ("", "Give 10 numbers, or train.class_weights=balanced.", ["train.class_weights=balanced"]),
        ("", "Leave train.ema_decay out.", ["train.ema_decay=null"]),  # the words of version 0.1
        ("", "Use another model, or omit train.ema_decay.", ["train.ema_decay=null"]),
        (
            "data.image_size=7 is not possible.",
            "Correct data.image_size, or use another model.",
            [f"data.image_size={TO_FILL_IN}"],
        ),
        ("my_model.py:3 could not be imported.", "Correct that line.", []),
        ("own_data:build returned no Splits.", "Return trainkit.data.base.Splits(info=DataInfo(...), train=...).", []),
        ("The ranks differ.", "Give data.name=NAME on every node.", [f"data.name={TO_FILL_IN}"]),
    ],
)
def test_the_change_that_an_error_asks_for_is_read_from_its_words(what: str, fix: str, changes: list[str]) -> None:
    assert settings_of(what, fix) == changes


@pytest.mark.parametrize("key", ["model.freeze", "train.global_batch_size", "optim.lr", "train.class_weights"])
def test_what_only_the_user_knows_is_refused_as_it_stands(key: str) -> None:
    with pytest.raises(UserError):
        load("single", [f"{key}={TO_FILL_IN}"])
