"""Libraries are imported before files of the same name in the user's folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.launch import batch_script
from trainkit.run.folder import RunDir
from trainkit.run.snapshot import write_code

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
    code = f"{batch_script.BEGIN}import torch, yaml, my_net; print(my_net.__file__)"
    done = start("-c", code, cwd=PROJECT, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / "my_net.py")


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
    assert {path.name for path in run.code.glob("*.py")} == {
        "my_net.py",
        "my_layers.py",
        "torch.py",
        "yaml.py",
        "numpy.py",
    }
