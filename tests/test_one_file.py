"""To add a strategy, a data set, a model or a logger is to add one file. (test_install.py has the user's own.)"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.shell import PROJECT, python

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


Answers = dict[str, tuple[int, str]]

CHOOSE = ["strategy.name=brandnew", "strategy.rings=4", "data.name=brandnew", "data.size=16"]
CHOOSE += ["model.name=brandnew", "model.depth=5", "monitor.loggers=[jsonl, brandnew]"]
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


@pytest.fixture(scope="module")
def answers(ours: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Exit code and words of a dry run for each thing that is wrong, or nothing, all by one process."""
    asked = ["", *WRONG]
    arguments = json.dumps([[*CHOOSE, *filter(None, [wrong])] for wrong in asked])
    done = python("-c", ALL_AT_ONCE, arguments, cwd=tmp_path_factory.mktemp("home"), PYTHONPATH=str(ours))
    assert done.returncode == 0, done.stderr
    return {key: tuple(json.loads(line)) for key, line in zip(asked, done.stdout.splitlines(), strict=True)}


def test_one_file_is_enough_to_be_found_checked_and_planned(answers: Answers) -> None:
    code, words = answers[""]
    rows = {line.split()[0]: line for line in words.splitlines() if line}
    assert code == 0, words
    assert "is one process" in rows["launch.ntasks_per_node"]
    assert rows["strategy.rings"].split()[1] == "4"


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_new_file_says_of_itself_is_held(answers: Answers, wrong: str) -> None:
    code, words = answers[wrong]
    assert (code, words.splitlines()[0].endswith(WRONG[wrong])) == (2, True), words
    assert f"override {wrong}" in words
    assert wrong != "monitor.loggers=[brandnwe]" or "Did you mean 'brandnew'?" in words
