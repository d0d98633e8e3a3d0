"""A run that `jobs.launch` started on several machines goes on by `jobs.launch` on each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit.config.loading import load, to_yaml
from trainkit.diagnosis.launched import on_every_machine
from trainkit.records.events import append_event
from trainkit.records.rundir import RunDir

TYPED = ["python", "-m", "jobs.launch", "ddp", "--nodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.7"]
TYPED += [
    "--master-port",
    "29500",
    "--secret-file",
    "run.secret",
    "--run-dir",
    "runs/a",
    "train.epochs=2",
    "optim.lr=0.1",
]


def launched(folder: Path, *, executor: str = "launch", nodes: int = 2) -> RunDir:
    run = RunDir.create(folder / "runs" / "my run", to_yaml(load("ddp").config))
    run.plan.write_text(json.dumps({"nodes": nodes}))
    run.manifest.write_text(json.dumps({"command": TYPED}))
    append_event(run, "submitted", executor=executor, job_id="4711")
    return run


def test_it_goes_on_with_the_run_of_each_machine(tmp_path: Path) -> None:
    run = launched(tmp_path)
    assert on_every_machine(run, f"python -m jobs.resume '{run.path}' --exclude n1") == (
        f"python -m jobs.launch '{run.path}' --nodes 2 --node-rank 1 --master-addr 10.0.0.7 --secret-file run.secret"
    )


def test_it_starts_anew_with_what_was_typed_and_what_is_mended(tmp_path: Path) -> None:
    run = launched(tmp_path)
    assert on_every_machine(run, f"python -m jobs.submit '{run.path}' train.micro_batch_size=4") == (
        "python -m jobs.launch ddp train.epochs=2 optim.lr=0.1"
        " --nodes 2 --node-rank 1 --master-addr 10.0.0.7 --secret-file run.secret train.micro_batch_size=4"
    )


@pytest.mark.parametrize("before", ["HF_HUB_OFFLINE=1", "env -u CUDA_VISIBLE_DEVICES", "A=1 B='x y'"])
@pytest.mark.parametrize("verb", ["resume", "submit"])
def test_variables_stay_before_the_command(tmp_path: Path, before: str, verb: str) -> None:
    run = launched(tmp_path)
    command = on_every_machine(run, f"{before} python -m jobs.{verb} '{run.path}'")
    assert command.startswith(f"{before} python -m jobs.launch ")
    assert command.count("=1") == before.count("=1")  # a variable is no setting


@pytest.mark.parametrize(("executor", "nodes"), [("launch", 1), ("local", 2), ("slurm", 2)])
def test_where_one_machine_starts_it_the_command_stays(tmp_path: Path, executor: str, nodes: int) -> None:
    run = launched(tmp_path, executor=executor, nodes=nodes)
    command = f"python -m jobs.resume '{run.path}'"
    assert on_every_machine(run, command) == command


@pytest.mark.parametrize("manifest", ["", "[]", '{"command": 3}', '{"command": ["jobs.launch"]}'])
def test_a_damaged_manifest_is_no_error(tmp_path: Path, manifest: str) -> None:
    run = launched(tmp_path)
    run.manifest.write_text(manifest)
    assert on_every_machine(run, "df -h x") == "df -h x"
    assert on_every_machine(run, f"python -m jobs.resume '{run.path}'").startswith("python -m jobs.")
