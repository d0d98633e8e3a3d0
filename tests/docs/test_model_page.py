"""docs/model.md: its programs run as they stand, in order, in one folder with a run of that name."""

import re
from pathlib import Path

import pytest
from PIL import Image

from tests import readme
from tests.rank_functions import run_ranks, train_run
from tests.shell import python
from trainkit.data.datasets.digits import build

PAGE = readme.DOCS / "model.md"
BLOCKS = re.findall(r"```python\n# (.*?)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and a picture."""
    folder = tmp_path_factory.mktemp("model")
    run_ranks(1, train_run, folder / "runs" / "ddp-0001", "ddp", ("train.max_steps=40",))
    pixels, _ = build(folder).test[0]
    Image.fromarray(pixels[0].numpy()).save(folder / "digit.png")
    return folder


def typed(program: str, home: Path) -> str:
    done = python("-c", program, cwd=home, TRAINKIT_RUNS="runs")
    assert done.returncode == 0, f"{program}\n{done.stderr}"
    return done.stdout


def test_a_run_is_opened_in_python(home: Path) -> None:
    _, label = build(home).test[0]
    assert re.fullmatch(rf"{label} \[<{label}: 0\.\d+>\]\n", typed(BLOCKS[0][1], home))
