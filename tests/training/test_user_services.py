"""Loops of users with what is around them: W&B, a bucket, a sweep, the watchdog, fp16, sharding."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.conftest import Trouble, bucket, s3_port  # noqa: F401
from tests.rank_functions import QUICK, run_command, run_ranks
from tests.training.test_user_loops import EXAMPLES, PLAIN, STOP, Script, plain
from trainkit.checkpoint.format import pointed
from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load
from trainkit.distributed.process_group import distributed, is_sharded
from trainkit.distributed.strategies.base import build_strategy
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.training.placement import parallelized

SUBMITTED = ("--executor", "local", "--wait", *QUICK, "checkpoint.every_steps=3")


@pytest.mark.nightly
def test_wandb_has_the_records_of_a_loop_over_a_restart(tmp_path: Path) -> None:
    from tests.monitor.test_wandb import history, leveldb_log

    script = plain(tmp_path, STOP, "monitor.loggers=[jsonl,wandb]", "monitor.log_every=1")
    away = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    for _ in range(2):
        script.wait(script.start(**away))
    proto: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    logged: list[tuple[int, str]] = []
    files = list(script.run.glob("wandb/offline-run-*/*.wandb"))
    for file in files:
        for row in history([proto.Record.FromString(blob) for blob in leveldb_log(file.read_bytes())]):
            logged += [(row["step"], name) for name in row if name.startswith("loss/")]
    assert len(files) == 2
    assert sorted(logged) == sorted(
        [(step, "loss/train") for step in range(1, 10)] + [(step, "loss/val") for step in (3, 6, 9)]
    )


@pytest.mark.nightly
def test_a_loop_goes_on_from_its_bucket_on_a_machine_that_has_no_checkpoint(
    tmp_path: Path,
    bucket: tuple[str, Trouble],  # noqa: F811
) -> None:
    whole = plain(tmp_path)
    whole.to_end()
    script = plain(tmp_path, STOP, f"checkpoint.remote={bucket[0]}")
    script.to_end()
    assert 5 in [event["step"] for event in script.events("uploaded")]
    shutil.rmtree(script.run / "checkpoints")
    script.to_end()
    assert script.weights() == whole.weights()
    assert read_events(RunDir(script.run), "started")[-1]["step"] == 5
    assert 9 in [event["step"] for event in script.events("uploaded")]


SWEPT = PLAIN.replace("signal, sys", "signal, sys, time").replace("trainkit.rank()", "trainkit.rank('seed=3')")
SWEPT = SWEPT.replace("# HERE", "time.sleep(0.3 * float(sys.argv[1]))").replace(
    "loss=1 / (1 + epoch.number)", "loss=float(sys.argv[1])"
)


@pytest.mark.nightly
def test_a_sweep_prunes_the_loop_that_is_behind(tmp_path: Path) -> None:
    """The worse one is slower, so that there is something to be behind."""
    (tmp_path / "train.py").write_text(SWEPT)
    words = ("--sweep", "lr=0,1", "--prune", "2", "--run-dir", "sweep", "--", "{lr}")
    done = run_command("submit", "train.py", *SUBMITTED, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    best, worse = (RunDir(tmp_path / "sweep" / name) for name in "01")
    assert [(history_of(run).finished, history_of(run).pruned) for run in (best, worse)] == [
        (True, False), (True, True)
    ]  # fmt: skip
    summaries = [json.loads(run.summary.read_text()) for run in (best, worse)]
    assert [summary["outcome"] for summary in summaries] == ["finished", "pruned"]
    assert (summaries[0]["steps"], summaries[1]["steps"] < 9) == (9, True)
    assert pointed(worse.checkpoints, "latest") == summaries[1]["steps"], "it may go on"


HANGS = 'while state.steps == 4 and rank.rank == 1 and os.environ["TRAINKIT_ATTEMPT"] == "0": time.sleep(0.5)'


@pytest.mark.nightly
def test_a_loop_that_hangs_is_ended_and_the_rank_and_its_line_are_named(tmp_path: Path) -> None:
    text = PLAIN.replace("# HERE", HANGS).replace("signal, sys", "signal, sys, time")
    (tmp_path / "train.py").write_text(text)
    words = ("--ntasks-per-node", "2", "--run-dir", "run", "launch.hang_seconds=6")
    done = run_command("submit", "train.py", *SUBMITTED, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *_ = read_events(RunDir(tmp_path / "run"), "failed")
    line = 1 + text[: text.index("while state")].count("\n")
    assert first["rank"] == 1
    assert f"project/train.py:{line} in <module>" in first["error"]
    assert history_of(RunDir(tmp_path / "run")).finished


@pytest.mark.nightly
def test_two_optimizers_in_fp16_go_on_bit_for_bit(tmp_path: Path) -> None:
    """With the scale of the loss, that both have."""
    text = (EXAMPLES / "gan.py").read_text().replace("import torch\n", "import os, signal\nimport torch\n", 1)
    settings = ("train.precision=fp16", "checkpoint.every_steps=5")
    whole = Script(tmp_path / "whole", text, 1, *settings)
    stopped = Script(
        tmp_path / "stopped", text.replace("state.step()", f"{STOP}\n            state.step()"), 1, *settings
    )
    for script in (whole, stopped):
        script.file.write_text(script.file.read_text().replace("'train.precision=fp32', ", ""))
    whole.to_end()
    stopped.to_end()
    assert stopped.events("handed_back")
    stopped.to_end()
    assert stopped.weights() == whole.weights()
    files = [script.run / "checkpoints/latest/state.json" for script in (whole, stopped)]
    one, other = [json.loads(file.read_text())["state"]["precision"] for file in files]
    assert one == other
    assert one["scaler"]["scale"] > 1
    weights = load_file(whole.run / "checkpoints/latest/generator.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())


def placed(env: RankEnv, name: str) -> dict[str, list[bool]]:
    """Of a model that is trained and of one that is not, made with another seed on each rank: wrapped, sharded, and
    the same on all ranks."""
    found = {}
    config = load("ddp", (*QUICK, f"strategy.name={name}")).config
    with distributed(env, use_gpu=False) as dist:
        for kind, trains in (("student", True), ("teacher", False)):
            torch.manual_seed(dist.rank)
            plain = nn.Linear(64, 64).requires_grad_(trains)
            model = parallelized(plain, build_strategy(config.strategy, dist, "fp32"), config, dist)
            weight = next(model.parameters()).detach()
            whole = weight.full_tensor() if is_sharded(weight) else weight  # type: ignore[attr-defined]
            sums = dist.gather_json(whole.sum().item())
            found[kind] = [model is not plain and not is_sharded(weight), is_sharded(weight), len(set(sums)) == 1]
    return found


@pytest.mark.parametrize(
    ("name", "student", "teacher"),
    [
        ("ddp", [True, False, True], [False, False, False]),
        pytest.param("fsdp", [False, True, True], [False, True, True], marks=pytest.mark.nightly),
    ],
)
def test_an_untrained_model_is_shared_out_only_where_models_are_sharded(
    name: str, student: list[bool], teacher: list[bool]
) -> None:
    for found in run_ranks(2, placed, name):
        assert found == {"student": student, "teacher": teacher}
