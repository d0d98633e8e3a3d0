"""The commands of a user whose machine has two accelerators: simulated ones, which torch loads as any plugin's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.accelerator import plugin
from tests.recipes import tiny
from trainkit.common import jsonl

pytestmark = [
    pytest.mark.long, pytest.mark.skipif(torch.accelerator.is_available(), reason="a real accelerator would be taken"),
]  # fmt: skip
QUICK = ("train.max_steps=20", "monitor.loggers=[jsonl]", "model.width=8")


class Machine:
    """The folder that a user is in, and the environment."""

    def __init__(self, folder: Path, place: Path, gpu: dict[str, str]) -> None:
        self.folder = folder
        here = {"TRAINKIT_DEVICE": "sim:2", "TRAINKIT_RUNS": str(folder / "runs")}
        self.env = {**os.environ, **gpu, **plugin(place), **here}

    def does(self, verb: str, *words: str, code: int = 0, **env: str) -> str:
        """Return what ``trainkit VERB`` prints, its errors included; ``env`` is set besides."""
        command = [sys.executable, "-m", "trainkit", verb, *words]
        env = {**self.env, **env}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, f"{' '.join(words)}: {done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def summary(self, run: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / "runs" / run / "summary.json").read_text())
        return told


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, gpu: dict[str, str]) -> Machine:
    return Machine(tmp_path_factory.mktemp("user"), tmp_path_factory.mktemp("plugin") / "site", gpu)


@pytest.fixture(scope="module")
def run(machine: Machine) -> str:
    """A run on both devices."""
    machine.does("submit", "ddp", "--gpus-per-node", "2", "--wait", "--run-dir", "runs/both", *QUICK)
    return "both"


def test_a_local_run_takes_both_devices(machine: Machine, run: str) -> None:
    told = machine.summary(run)
    assert (told["device"], told["world_size"], told["outcome"]) == ("Simulated accelerator", 2, "finished")


def test_it_is_evaluated_and_predicts_there(machine: Machine, run: str) -> None:
    assert "acc1" in machine.does("evaluate", run)
    (machine.folder / "images").mkdir()
    Image.new("L", (8, 8), 200).save(machine.folder / "images" / "one.png")
    assert "one.png" in machine.does("predict", run, "images")


def test_its_weights_are_exported(machine: Machine, run: str) -> None:
    machine.does("export", run, "weights.safetensors")
    taken = load_file(machine.folder / "weights.safetensors")
    assert all(value.isfinite().all() for value in taken.values())


def test_compiling_is_refused_by_the_run_that_asks_for_it(machine: Machine) -> None:
    words = ("--gpus-per-node", "1", "--wait", "--run-dir", "runs/compiled", "train.compile=model", *QUICK)
    said = machine.does("submit", "single", *words, code=2)
    assert "train.compile must be off on GPUs by sim" in said


def test_three_ranks_are_refused_where_two_devices_are(machine: Machine) -> None:
    said = machine.does("submit", "ddp", "--gpus-per-node", "3", *QUICK, code=3)
    assert "3 GPUs were requested, but this machine does not have them" in said


def test_nodes_that_are_simulated_share_the_devices(machine: Machine) -> None:
    machine.does(
        "submit", "ddp", "--executor", "local", "--nodes", "2", "--gpus-per-node", "1", "--wait",
        "--run-dir", "runs/two", *QUICK,
    )  # fmt: skip
    assert machine.summary("two")["device"] == "Simulated accelerator"


def test_two_nodes_of_two_devices_shard_within_each(machine: Machine) -> None:
    words = ("--executor", "local", "--nodes", "2", "--gpus-per-node", "2", "--wait", "--run-dir", "runs/hsdp")
    machine.does("submit", "hsdp", *words, *QUICK, TRAINKIT_DEVICE="sim:4", SIM_DEVICES="4")
    told = machine.summary("hsdp")
    assert (told["device"], told["world_size"], told["outcome"]) == ("Simulated accelerator", 4, "finished")


def test_cifar10s_recipe_learns_there_what_it_learns_on_a_cpu(machine: Machine, tmp_path: Path) -> None:
    root = tmp_path / "data"
    machine.does("prepare", "cifar10", "--root", str(root), "--archive", str(tiny.write_cifar10(tmp_path)))
    words = (f"data.root={root}", "train.global_batch_size=15", "train.precision=fp32", "monitor.log_every=1", *QUICK)
    losses = []
    for gpus in ("1", "0"):
        run = tmp_path / gpus
        machine.does("submit", "recipes/cifar10_fast", "--gpus-per-node", gpus, "--run-dir", str(run), "--wait", *words)
        losses.append([record["loss"] for record in jsonl.read_jsonl(run / "metrics.jsonl")])
    assert len(losses[0]) == 22
    assert losses[0][19] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_check_measures_the_devices(machine: Machine) -> None:
    told = machine.does("cluster", "check", "--executor", "local", "--gpus-per-node", "2", "--json")
    report = json.loads(told[: told.rindex("}") + 1])
    assert [report["found"][rank]["device"] for rank in ("0", "1")] == ["Simulated accelerator"] * 2
    assert [(gpu["index"], gpu["name"]) for gpu in report["ranks"]["0"]["gpus"]] == [
        (index, "Simulated accelerator") for index in range(2)
    ]
    assert report["found"]["0"]["inside"]["gb_s"] > 0


def test_a_bench_splits_batches_over_both_devices(machine: Machine) -> None:
    told = machine.does("bench", "dp-inference", "--gpus-per-node", "2", "--arms", "4,16", "--updates", "2", "--wait")
    assert "Simulated accelerator" in told
    assert "DataParallel, 16" in told


def test_training_is_proved_there(machine: Machine) -> None:
    arms = "as-on-cpu,fp32,bf16,fp16,o2,dp,dp-resumed,ddp,ddp-resumed,zero-resumed,fsdp,fsdp-resumed,largest-batch"
    words = ("--gpus-per-node", "2", "--wait", "--arms", f"{arms},killed-resumed")
    told = machine.does("cluster", "check", "--train", *words)
    assert "Training works here: 14 of 14 passed." in told


def test_a_run_whose_gpu_does_nothing_saves_and_gives_its_node_back(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(IDLE_NVML)
    path = os.pathsep.join([str(tmp_path), machine.env["PYTHONPATH"]])
    words = ("train.epochs=100000", "monitor.hardware_every_seconds=0.2", "launch.idle_minutes=0.02")
    machine.does(
        "submit", "ddp", "--gpus-per-node", "2", "--wait", "--run-dir", "runs/idle", "monitor.loggers=[jsonl]", *words,
        code=1, PYTHONPATH=path,
    )  # fmt: skip
    events = jsonl.read_jsonl(machine.folder / "runs" / "idle" / "events.jsonl")
    kinds = [event["event"] for event in events]
    assert kinds.count("started") == 1  # it is not started again
    assert kinds.index("gpu_idle") < kinds.index("saved") < kinds.index("handed_back")
    assert "GPU 1 of" in machine.does("why", "idle")


IDLE_NVML = """
class NVMLError(Exception): pass
class Utilization: gpu = 0
NVML_TEMPERATURE_GPU = 0
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetUtilizationRates(handle):
    used = Utilization()
    used.gpu = 0 if handle else 60
    return used
def fails(*_): raise NVMLError
nvmlDeviceGetMemoryInfo = nvmlDeviceGetPowerUsage = nvmlDeviceGetTemperature = fails
nvmlDeviceGetTotalEnergyConsumption = fails
"""
