"""To add a strategy, a data set, a model or a logger is to add one file, in a package of ours or of the user's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
FILES = {
    "strategies": 'RANKS = "one"\n\ndef build(dist, *, rings: int = 2): ...\n',
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


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the same four files."""
    folder = tmp_path_factory.mktemp("home")
    for package, text in FILES.items():
        (folder / f"my_{Path(package).name}.py").write_text(text)
    return folder


Answers = dict[tuple[str, str], tuple[int, str]]

NEW = {"of ours": ["brandnew"] * 4, "of the user's own": [f"my_{Path(package).name}:build" for package in FILES]}
WRONG = {
    "strategy.rigns=4": "Unknown key 'strategy.rigns'.",
    "data.size=big": "data.size=big is not possible.",
    "model.depht=5": "Unknown key 'model.depht'.",
    "launch.nodes=2": "cannot run with launch.nodes=2.",
    "monitor.loggers=[brandnwe]": "Unknown logger 'brandnwe'.",
    "monitor.loggers=[my_monitr:build]": "No module 'my_monitr' for 'my_monitr:build'.",
}
ALL_AT_ONCE = """
import contextlib, io, json, sys
from jobs import submit
from trainkit.errors import TrainkitError

for arguments in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = submit.main(["ddp", "--executor", "local", "--dry-run", *arguments], {})
        except TrainkitError as error:
            code = error.exit_code
            print(error, file=err)
    print(json.dumps([code, err.getvalue()]))
"""


def choose(where: str) -> list[str]:
    """Overrides that choose the new strategy, data set, model and logger, each with an option where it has one."""
    strategy, data, model, logger = NEW[where]
    return [
        f"strategy.name={strategy}", "strategy.rings=4", f"data.name={data}", "data.size=16",
        f"model.name={model}", "model.depth=5", f"monitor.loggers=[jsonl, {logger}]",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def answers(ours: Path, home: Path) -> Answers:
    """Exit code and words of a dry run for (where the new files are, what is wrong), all by one process."""
    asked = [(where, wrong) for where in NEW for wrong in ("", *WRONG)]
    arguments = json.dumps([[*choose(where), *filter(None, [wrong])] for where, wrong in asked])
    command = [sys.executable, "-c", ALL_AT_ONCE, arguments]
    env = {**os.environ, "PYTHONPATH": str(ours)}
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {key: tuple(json.loads(line)) for key, line in zip(asked, done.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize("where", NEW)
def test_one_file_is_enough_to_be_found_checked_and_planned(answers: Answers, where: str) -> None:
    code, words = answers[where, ""]
    rows = {line.split()[0]: line for line in words.splitlines() if line}
    assert code == 0, words
    assert "is one process" in rows["launch.ntasks_per_node"]
    assert rows["strategy.rings"].split()[1] == "4"


@pytest.mark.parametrize("where", NEW)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_new_file_says_of_itself_is_held(answers: Answers, where: str, wrong: str) -> None:
    code, words = answers[where, wrong]
    assert (code, words.splitlines()[0].endswith(WRONG[wrong])) == (2, True), words
    assert f"override {wrong}" in words


def test_a_misspelt_logger_is_answered_with_the_nearest(answers: Answers) -> None:
    assert "Did you mean 'brandnew'?" in answers["of ours", "monitor.loggers=[brandnwe]"][1]
