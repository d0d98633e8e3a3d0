import ast
import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "jobs" / "notebooks" / "join_colab.ipynb"


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
