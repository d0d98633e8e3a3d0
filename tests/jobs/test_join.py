from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.join import say_end
from trainkit import fileio
from trainkit.run.folder import RunDir
from trainkit.swarm import processes
from trainkit.swarm.address import EXAMPLE

Command = Callable[..., Any]
NOTEBOOK = Path(__file__).parents[2] / "jobs" / "notebooks" / "join_colab.ipynb"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "TOKEN missing."),
        (("data.root=x",), "TOKEN missing."),
        (("203.0.113.7:4711",), "There is neither a token nor an address in '203.0.113.7:4711'."),
        ((EXAMPLE[:-1],), f"'{EXAMPLE[:-1]}' is not the address of a peer."),
        ((EXAMPLE, EXAMPLE + "x"), f"'{EXAMPLE}x' is not the address of a peer."),
        (("trainkit1.nonsense",), "This is no token."),
        (("trainkit1.nonsense", "trainkit1.more"), "One token at a time."),
        ((EXAMPLE, "optim.lr=1"), "'optim.lr' cannot be set by a peer that joins."),
        ((EXAMPLE, "--port", "4711"), "--port needs --public."),
        ((EXAMPLE, "--host", "10.0.0.1"), "--host needs --public."),
        ((EXAMPLE, "--public", "--port", "-1"), "--port -1 does not exist."),
        ((EXAMPLE, "--public"), "Only those whom the owner trusts can be reached by others."),
        ((EXAMPLE, "--publik"), "Unrecognized arguments: --publik."),
    ],
)
def test_what_is_wrong_is_said_at_once_and_nothing_is_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr(processes, "require_hivemind", lambda: pytest.fail("nothing is wrong with these words"))
    done = command("join", *arguments)
    assert done.code == 2
    assert done.err.startswith(says)
    assert not (tmp_path / "runs").exists()


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
