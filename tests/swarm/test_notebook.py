"""The volunteers' notebook, executed as in Colab: by a kernel of its own, in a swarm on this machine."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.swarm.conftest import PROJECT, Command, Commands, wait_for

NOTEBOOK = PROJECT / "jobs" / "notebooks" / "join_colab.ipynb"
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
try:
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
finally:
    nbformat.write(notebook, sys.argv[2])
"""


def execution(commands: Commands, address: str) -> tuple[Command, Path]:
    """Start to execute it, with the first cell filled in; the file that will have its outputs."""
    number = len(commands.started)
    filled, done = commands.folder / f"{number}.ipynb", commands.folder / f"{number}-done.ipynb"
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    (settings,) = (cell for cell in notebook["cells"] if cell["id"] == "settings")
    source = re.sub(r'^TOKEN = ""', f'TOKEN = "{address}"', "".join(settings["source"]), flags=re.M)
    settings["source"] = source.replace('NAME = "colab"', 'NAME = "notebook"')
    # The creator of these tests has a model of its own; a volunteer's run would ask for none of it.
    (join,) = (cell for cell in notebook["cells"] if cell["id"] == "join")
    join["source"] = "".join(join["source"]).replace('"--name", NAME', '"--allow-code", "--name", NAME')
    filled.write_text(json.dumps(notebook), encoding="utf-8")
    out = commands.folder / f"{number}-notebook.txt"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", EXECUTE, str(filled), str(done)],
            cwd=commands.folder,
            env={
                **os.environ,
                "PYTHONPATH": str(PROJECT),
                "HOME": str(commands.folder / "home"),
                "IPYTHONDIR": str(commands.folder / "ipython"),
                "OMP_NUM_THREADS": "1",
            },
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    command = Command(process, out)
    commands.started.append(command)
    return command, done


def kernel_of(command: Command) -> psutil.Process:
    def found() -> list[psutil.Process]:
        children = psutil.Process(command.process.pid).children(recursive=True)
        return [child for child in children if any("ipykernel" in word for word in child.cmdline())]

    return wait_for(found, 60, "the notebook's kernel")[0]


def ids_of_notebook(commands: Commands, address: str) -> set[str]:
    return {row["peer"] for row in commands.status(address)["peers"] if row["name"] == "notebook"}


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


@pytest.mark.long
@pytest.mark.swarm
def test_the_notebook_joins_plots_and_comes_back_after_a_restart(commands: Commands) -> None:
    (commands.folder / "home").mkdir()
    creator, address = commands.create("collaborative.round_seconds=5", "collaborative.rounds=500")
    first, _ = execution(commands, address)
    creator.says("notebook has joined", 120)
    before = ids_of_notebook(commands, address)
    kernel_of(first).kill()  # "restart runtime"
    first.ends()

    second, done = execution(commands, address)
    runs = commands.folder / "home" / "trainkit" / "runs"

    def trained_again() -> bool:
        files = [run / "metrics.jsonl" for run in sorted(runs.glob("*-peer-*"))]
        return len(files) == 2 and files[1].is_file() and len(files[1].read_text().splitlines()) >= 2

    wait_for(trained_again, 120, f"two rounds after the restart: {second.output}")
    after = ids_of_notebook(commands, address)
    assert len(before) == 1
    assert after == before

    creator.process.send_signal(2)
    assert second.ends(120) == 0, second.output
    cells = {cell["id"]: cell for cell in json.loads(done.read_text(encoding="utf-8"))["cells"]}
    said = "".join("".join(item["text"]) for item in cells["join"]["outputs"] if item["output_type"] == "stream")
    assert "peers averaged" in said
    assert said.rstrip().endswith("Done.")
    assert any("image/svg+xml" in item.get("data", {}) for item in cells["join"]["outputs"])
    assert creator.ends() == 0
