"""trainkit without its checkout: the wheel, installed, and a user in a folder of their own."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

PRESET = """
extends: single
seed: 7
model: {name: "mine:mlp", width: 24}
strategy: {name: "mine:alone"}
train: {epochs: 1}
monitor: {loggers: [console, jsonl, "mine:numbers"]}
launch: {cluster: here}
"""
CLUSTER = 'launch: {gpus_per_node: 0, time: "5:00"}\n'
OWN_CODE = """
from contextlib import nullcontext

from torch import nn

RANKS = "one"


def mlp(info, *, width: int = 8):
    pixels = info.in_chans * info.image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, info.num_classes))


class Alone:
    def parallelize(self, model):
        return model

    def grad_sync(self, model, *, enabled):
        return nullcontext()


def alone(dist):
    return Alone()


class Numbers:
    def __init__(self, file):
        self.file = file

    def log(self, record):
        with self.file.open("a") as out:
            out.write(f"{record['split']} {record['step']}\\n")

    def close(self): ...


def numbers(run_dir, config, start):
    return Numbers(run_dir.path / "numbers.txt")
"""

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git knows: building writes into the folder that it builds."""
    copy, dist = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("jobs", "trainkit", "configs", "slurm"):
        shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, copy)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(dist)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation of the wheel leaves in site-packages; pip does no more with pure Python."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder under git: a preset, a site profile and code of their own, and nothing of ours."""
    folder = tmp_path_factory.mktemp("thesis")
    (folder / "configs" / "clusters").mkdir(parents=True)
    (folder / "configs" / "mine.yaml").write_text(PRESET)
    (folder / "configs" / "clusters" / "here.yaml").write_text(CLUSTER)
    (folder / "mine.py").write_text(OWN_CODE)
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "mine"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def python(installed: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """``python(...)`` in the user's folder, on a machine without SLURM, with the installed trainkit."""
    state = tmp_path_factory.mktemp("state")
    tools = tmp_path_factory.mktemp("bin")
    (tools / "git").symlink_to(shutil.which("git") or "/usr/bin/git")

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": str(tools), "PYTHONPATH": str(installed), "HOME": str(state), "XDG_STATE_HOME": str(state),
            "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        }  # fmt: skip
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, check=False)

    return call


@pytest.fixture(scope="module")
def run(python: Command, home: Path) -> Path:
    """The run folder of a local training with the user's own preset and model."""
    done = python("-m", "jobs.submit", "mine", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    return home / "runs" / "mine-0001"


def test_a_folder_of_that_name_is_not_in_the_way(python: Command, home: Path) -> None:
    (home / "trainkit").mkdir()
    done = python("-m", "jobs.submit", "--help")
    (home / "trainkit").rmdir()
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_all_that_the_checkout_holds(wheel: Path) -> None:
    code = [file for name in ("jobs", "trainkit") for file in (PROJECT / name).rglob("*.py")]
    names = {str(file.relative_to(PROJECT)) for file in code}
    data = [*(PROJECT / "configs").rglob("*.*"), *(PROJECT / "slurm").glob("*.sbatch")]
    names |= {f"trainkit/{file.relative_to(PROJECT)}" for file in data}
    kinds = ("css", "html", "jinja", "js", "md", "svg", "yaml")
    tables = [file for kind in kinds for file in (PROJECT / "trainkit").rglob(f"*.{kind}")]
    names |= {str(file.relative_to(PROJECT)) for file in tables}
    with zipfile.ZipFile(wheel) as content:
        held = {name for name in content.namelist() if ".dist-info/" not in name}
    assert held == names


def test_the_installation_brings_code_presets_templates_and_a_command(python: Command, installed: Path) -> None:
    found = "importlib.metadata.distribution('trainkit-vision').entry_points.select(name='trainkit')"
    places = "import importlib.metadata, sys, trainkit, jobs; print(trainkit.__file__, jobs.__file__)"
    done = python("-c", f"{places}; (it,) = {found}; sys.argv = ['trainkit']; it.load()()")
    assert (done.returncode, done.stderr) == (0, "")
    first, command = done.stdout.splitlines()[:2]
    assert first.split() == [str(installed / name / "__init__.py") for name in ("trainkit", "jobs")]
    assert command.startswith("trainkit VERB ...")
    presets = "ddp, ddp_sim, dp, fsdp, hivemind, hsdp, lab, script, single, zero"
    assert f"presets    {installed / 'trainkit' / 'configs'}: {presets}" in done.stdout
    templates = "hivemind_peer.sbatch, script.sbatch, train.sbatch, train_torchrun.sbatch"
    assert f"templates  {installed / 'trainkit' / 'slurm'}: {templates}" in done.stdout


def test_a_preset_of_the_users_own_extends_a_packaged_one(python: Command, home: Path) -> None:
    done = python("-m", "jobs.submit", "mine", "--dry-run")
    rows = {row[0]: row[1:] for line in done.stderr.splitlines() if (row := line.split())}
    assert rows["model.width"][:3] == ["24", "file", "configs/mine.yaml:4"]
    assert rows["launch.time"][0] == "5:00"
    assert rows["strategy.name"][0] == "mine:alone"
    assert not (home / "runs").exists()


def test_an_installed_trainkit_trains_from_a_folder_of_the_users_own(run: Path, home: Path) -> None:
    """With a model, a strategy and a logger of the user's own in one file, under the user's git commit."""
    summary, plan, manifest = (
        json.loads((run / f"{name}.json").read_text()) for name in ("summary", "plan", "manifest")
    )  # fmt: skip
    assert (summary["outcome"], summary["epochs"], summary["params"]) == ("finished", 1.0, 64 * 24 + 24 + 240 + 10)
    said = next(item for item in plan["decisions"] if item["name"] == "ntasks_per_node")
    assert (said["value"], said["reason"]) == (1, "mine:alone is one process")
    lines = (run / "numbers.txt").read_text().splitlines()
    assert (lines[-1].split()[0], "val" in {line.split()[0] for line in lines}) == ("test", True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=home, capture_output=True, text=True, check=True)
    assert manifest["git"]["commit"] == head.stdout.strip()


def test_the_snapshot_of_an_installed_trainkit_is_laid_out_like_a_checkout(run: Path) -> None:
    names = {path.name for path in (run / "code").iterdir()}
    assert sorted(names - {"__pycache__"}) == ["configs", "jobs", "mine.py", "trainkit"]
    assert (run / "code" / "configs" / "ddp.yaml").is_file()
    assert not (run / "code" / "trainkit" / "configs").exists()
