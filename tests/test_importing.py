"""Libraries are imported before files of the same name in the user's folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.run.folder import RunDir
from trainkit.run.snapshot import write_code
from trainkit.schedulers.base import BEGIN

PROJECT = Path(__file__).parents[1]
STRAY = ("torch", "yaml", "typing", "numpy", "argparse", "json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files that are called as libraries are, and a module of the user's own."""
    for name in STRAY:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the folder was imported')\n")
    (tmp_path / "my_net.py").write_text("import my_layers\ndef net(info): ...\n")
    (tmp_path / "my_layers.py").write_text("")
    return tmp_path


def start(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHONPATH": str(PROJECT), **env}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=own, capture_output=True, text=True, check=False)


def test_a_command_is_given_in_a_folder_with_files_named_as_libraries(folder: Path) -> None:
    done = start("-m", "jobs.submit", "ddp", "model.name=my_net:net", "--dry-run", cwd=folder)
    assert done.returncode == 0, done.stderr


def test_a_job_takes_the_users_modules_from_its_snapshot_and_no_libraries(folder: Path) -> None:
    for package in ("trainkit", "jobs"):
        (folder / package).symlink_to(PROJECT / package)
    code = f"{BEGIN}import torch, yaml, my_net; print(my_net.__file__)"
    done = start("-c", code, cwd=PROJECT, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / "my_net.py")


# A folder with packages called as ours are


TRAINKIT = "import sys; from trainkit.__main__ import main; sys.exit(main())\n"
"""What pip makes of `[project.scripts]`; Python puts its folder first on the module path."""


@pytest.fixture
def thesis(folder: Path) -> Path:
    """The same folder with jobs/, tests/, configs/ and slurm/, all of the user's own."""
    for name in ("jobs", "tests", "configs", "slurm"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('{name} of the folder was imported')\n")
    (folder / "jobs" / "submit.py").touch()
    (folder / "my_net.py").write_text(
        "from torch import nn\nimport my_layers\n"
        "def net(info): return nn.Sequential(nn.Flatten(), nn.Linear(info.image_size**2, info.num_classes))\n"
    )
    (folder / "bin").mkdir()
    (folder / "bin" / "trainkit").write_text(TRAINKIT)
    return folder


QUICK = ("model.name=my_net:net", "train.max_steps=2", "monitor.loggers=[jsonl]")


@pytest.mark.parametrize("command", [("bin/trainkit",), ("-m", "trainkit")], ids=["script", "module"])
@pytest.mark.parametrize("verb", ["submit", "launch", "train"])
def test_trainkit_trains_in_a_folder_with_its_own_jobs(thesis: Path, command: tuple[str, ...], verb: str) -> None:
    flags = () if verb == "train" else ("--gpus-per-node", "0")
    done = start(*command, verb, "single", *flags, *QUICK, cwd=thesis, PATH="", TRAINKIT_RUNS="runs")
    assert done.returncode == 0, done.stderr
    assert (thesis / "runs" / "single-0001" / "summary.json").is_file()
    code = thesis / "runs" / "single-0001" / "code"
    assert verb == "train" or not (code / "jobs" / "submit.py").samefile(thesis / "jobs" / "submit.py")
    assert "python -m jobs" not in done.stdout, "which would not work here"


def test_a_module_jobs_py_of_the_users_own_is_in_nobodys_way(thesis: Path) -> None:
    (thesis / "jobs").rename(thesis / "old_jobs")
    (thesis / "jobs.py").write_text("raise RuntimeError('jobs.py of the folder was imported')\n")
    done = start("bin/trainkit", "submit", "single", *QUICK, cwd=thesis, PATH="", TRAINKIT_RUNS="runs")
    assert done.returncode == 0, done.stderr
    assert not (thesis / "runs" / "single-0001" / "code" / "jobs.py").exists()


@pytest.mark.parametrize(("model", "line"), [("my_net:net", "import jobs.util"), ("jobs.util:net", "")])
def test_who_imports_a_jobs_of_their_own_is_told_what_it_is_behind(thesis: Path, model: str, line: str) -> None:
    (thesis / "jobs" / "util.py").touch()
    (thesis / "my_net.py").write_text(f"{line}\ndef net(info): ...\n")
    done = start("bin/trainkit", "submit", "single", f"model.name={model}", "--dry-run", cwd=thesis)
    what, why, fix = done.stderr.splitlines()
    assert done.returncode == 2
    assert "which would be trainkit's own package 'jobs'" in what
    assert f"{thesis / 'jobs'} has the name" in why
    assert "my_jobs" in fix


@pytest.mark.parametrize("name", ["trainkit.py", "trainkit/__init__.py"])
def test_a_trainkit_of_the_users_own_is_named_before_it_runs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise RuntimeError('it ran')\n")
    done = start("-m", "jobs.submit", "single", cwd=tmp_path)
    what, why, fix = done.stderr.splitlines()
    assert done.returncode == 2
    assert what == f"{tmp_path / name} would be imported in place of trainkit's own package."
    assert (why[:7], fix[:7]) == ("  why: ", "  fix: ")


def test_a_program_of_the_users_own_that_imports_trainkit_is_left_as_it_is(folder: Path) -> None:
    (folder / "script.py").write_text("import trainkit, json\n")
    done = start("script.py", cwd=folder)
    assert "json.py of the folder was imported" in done.stderr


def test_a_library_elsewhere_on_pythonpath_comes_before_the_installed_one(folder: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "yaml.py").write_text("")
    code = "from trainkit import importing; importing.installed_first(); import yaml; print(yaml.__file__)"
    done = start("-c", code, cwd=folder, PYTHONPATH=f"{PROJECT}:{newer}")
    assert done.stdout.strip() == str(newer / "yaml.py"), done.stderr


def test_the_snapshot_has_no_file_that_python_would_start_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sitecustomize.py").write_text("")
    monkeypatch.chdir(folder)
    run = RunDir.create(tmp_path / "runs" / "one-0001", "")
    write_code(run)
    assert {path.stem for path in run.code.glob("*.py")} == {"my_net", "my_layers", "torch", "yaml", "numpy"}
