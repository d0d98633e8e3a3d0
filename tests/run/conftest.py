"""What the tests of a run's records share."""

from pathlib import Path

import pytest

from trainkit.run import code_files
from trainkit.run.folder import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs" / "ddp-0001", "seed: 0\n")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of a few files is installed, and the current folder is empty."""
    for name in (*(f"jobs/verb{number}.py" for number in range(40)), "jobs/cli.py", "trainkit/kept.py"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / name).write_text(f"# {name}\n")
    monkeypatch.setattr(code_files, "INSTALLED", tmp_path / "checkout")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
