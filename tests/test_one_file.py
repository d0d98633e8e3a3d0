"""To add a strategy, a data set, a model or a logger is to add one file. (test_install.py has the user's own.)"""

import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.shell import PROJECT, python

FILES = {
    "distributed/strategies": 'RANKS = "one"\n\ndef build(dist, *, rings: int = 2): ...\n',
    "data/datasets": "def build(root, *, size: int = 8): ...\n",
    "models": "def build(info, *, depth: int = 3): ...\n",
    "monitor": "def build(run_dir, config, start): ...\n",
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program with a file ``brandnew.py`` in each of the four packages, and nothing else changed."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("jobs", "trainkit", "configs"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for package, text in FILES.items():
        (folder / "trainkit" / package / "brandnew.py").write_text(text)
    return folder


CHOOSE = ["strategy.name=brandnew", "strategy.rings=4", "data.name=brandnew", "data.size=16"]
CHOOSE += ["model.name=brandnew", "model.depth=5", "monitor.loggers=[jsonl, brandnew]"]


def dry_run(ours: Path, folder: Path, *settings: str) -> CompletedProcess[str]:
    words = ("-m", "jobs.submit", "ddp", "--executor", "local", "--dry-run", *CHOOSE, *settings)
    return python(*words, cwd=folder, PYTHONPATH=str(ours))


def test_one_file_is_enough_to_be_found_checked_and_planned(ours: Path, tmp_path: Path) -> None:
    done = dry_run(ours, tmp_path)
    rows = {line.split()[0]: line for line in done.stderr.splitlines() if line}
    assert done.returncode == 0, done.stderr
    assert "is one process" in rows["launch.ntasks_per_node"]
    assert rows["strategy.rings"].split()[1] == "4"
    done = dry_run(ours, tmp_path, "launch.nodes=2")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "ranks=2 does not go with strategy.name=brandnew.")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("strategy.rigns=4", "Unknown key 'strategy.rigns'."),
        ("strategy.name=brandnwe", "Did you mean 'brandnew'?"),
        ("monitor.loggers=[brandnwe]", "Did you mean 'brandnew'?"),
    ],
)
def test_what_the_new_file_says_of_itself_is_held(ours: Path, tmp_path: Path, wrong: str, says: str) -> None:
    done = dry_run(ours, tmp_path, wrong)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert f"override {wrong}" in done.stderr
