import ast
import json
from pathlib import Path

import pytest

from jobs.join import say_end
from trainkit import fileio
from trainkit.run.folder import RunDir

NOTEBOOK = Path(__file__).parents[2] / "jobs" / "notebooks" / "join_colab.ipynb"


def test_who_leaves_is_told_what_it_has_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    say_end("stopped", run)
    assert "Averaged" not in capsys.readouterr().out  # it has met nobody
    for index, peers in enumerate((3, 1, 2)):
        told = {"split": "train", "step": index, "peers": peers, "bytes_up": 0 if peers == 1 else 700_000}
        fileio.append_jsonl(run.metrics, {"time": 1.8e9, "epoch": 1.0, "loss": 1.0, **told})
    say_end("stopped", run)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["Left the swarm.", "Averaged with others in 2 rounds, 1.4 MB sent."]


def test_the_notebook_is_valid_and_joins_in_a_process_of_its_own() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert [cell["id"] for cell in notebook["cells"]] == ["about", "settings", "install", "join"]  # three to run
    cells = notebook["cells"][1:]
    assert [(cell["cell_type"], cell["outputs"], cell["execution_count"]) for cell in cells] == [("code", [], None)] * 3
    sources = ["".join(cell["source"]) for cell in cells]
    assert all(map(ast.parse, sources))
    # A token is no argument, which others see.
    for text in ('"-m", "jobs.join", "--name"', '"TRAINKIT_TOKEN": token', "start_new_session=True"):
        assert text in sources[-1]
