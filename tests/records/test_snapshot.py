from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.records import snapshot
from trainkit.records.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return RunDir.create(tmp_path / "runs" / "ddp-0001", "seed: 0\n")


def manifest(run: RunDir, *command: str) -> dict[str, Any]:
    snapshot.write_manifest(run, list(command))
    content: dict[str, Any] = json.loads(run.manifest.read_text())
    return content


def files(run: RunDir) -> set[str]:
    return {str(file.relative_to(run.code)) for file in run.code.rglob("*") if file.is_file()}


# Code


def test_the_snapshot_runs_without_the_checkout(run: RunDir) -> None:
    snapshot.write_code(run)
    code = "import jobs.submit, trainkit.config.loading as l; print(jobs.submit.__file__); l.load('ddp')"
    env = {**os.environ, "PYTHONPATH": str(run.code)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(run.code / "jobs" / "submit.py")


def test_compiled_files_stay_behind(run: RunDir) -> None:
    snapshot.write_code(run)
    assert not [name for name in files(run) if "__pycache__" in name]


def test_the_users_own_modules_come_along(run: RunDir) -> None:
    Path("package").mkdir()
    Path("package/model.py").write_text("def build(): pass\n")
    Path("model.py").touch()
    snapshot.write_code(run)
    assert {"model.py", "package/model.py"} <= files(run)


@pytest.mark.parametrize("name", ["runs/x.py", "data/x.py", ".venv/x.py", "venv/site-packages/x.py", "notes.txt"])
def test_what_is_no_code_of_the_users_stays_behind(run: RunDir, name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).touch()
    snapshot.write_code(run)
    assert name not in files(run)


def test_copies_in_other_run_folders_stay_behind(run: RunDir) -> None:
    other = RunDir.create(Path("experiments/ddp-0001"), "seed: 0\n")
    other.manifest.touch()
    other.code.mkdir()
    (other.code / "x.py").touch()
    snapshot.write_code(run)
    assert not [name for name in files(run) if name.startswith("experiments")]


def test_a_link_that_leads_nowhere_is_no_error(run: RunDir) -> None:
    Path("gone.py").symlink_to("nowhere.py")
    snapshot.write_code(run)
    assert "gone.py" not in files(run)


def test_a_home_folder_is_no_project(run: RunDir) -> None:
    for number in range(2001):
        Path(f"m{number}.py").touch()
    snapshot.write_code(run)
    assert "m0.py" not in files(run)


# Manifest


def test_the_manifest_says_what_the_run_was_made_of(run: RunDir) -> None:
    written = manifest(run, "python", "-m", "jobs.submit", "ddp")
    assert written["command"] == ["python", "-m", "jobs.submit", "ddp"]
    assert written["cwd"] == str(Path.cwd())
    assert written["packages"]["pydantic"]
    assert set(written["git"]) == {"commit", "diff", "untracked"}


@pytest.mark.parametrize(
    "word", ["WANDB_API_KEY=s3cret", "--token=s3cret", "remote.secret_key=s3cret", "password:s3cret"]
)
def test_a_secret_on_the_command_line_is_not_written(run: RunDir, word: str) -> None:
    assert "s3cret" not in json.dumps(manifest(run, word))


@pytest.mark.parametrize(
    "line",
    [
        'WANDB_API_KEY = "s3cret"',
        "export AWS_SECRET_ACCESS_KEY=s3cret",
        '{"hf_token": "s3cret"}',
        "password: s3cret",
        "login('hf_s3cretAAAAAAAAAAAAAAAAAAAA')",
        "AKIAs3cretAAAAAAAAAAA",
    ],
)
def test_a_secret_in_an_uncommitted_change_is_not_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(snapshot, "_git", lambda *arguments: f"+{line}\n" if arguments[0] == "diff" else "")
    assert "s3cret" not in json.dumps(manifest(run))


def test_ordinary_code_in_an_uncommitted_change_is_written_as_it_is(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "+    return sorted(runs, key=lambda run: run.name)\n"
    monkeypatch.setattr(snapshot, "_git", lambda *arguments: line)
    assert manifest(run)["git"]["diff"] == line


def test_the_environment_is_not_written(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "v4lue")
    assert "v4lue" not in json.dumps(manifest(run))


def test_without_git_the_manifest_says_the_rest(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert manifest(run)["git"] == {"commit": None, "diff": "", "untracked": []}
