from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shell import faults
from trainkit.config.loading import Loaded
from trainkit.errors import UserError
from trainkit.launch.plan import make_plan
from trainkit.schedulers.slurm import batch_script
from trainkit.site.profile import Site

Load = Callable[..., Loaded]
GOLDEN = Path(__file__).with_name("golden.sbatch")


@pytest.fixture
def script(loaded: Load, gpu_site: Site) -> Callable[..., str]:
    def make(
        run: str = "/home/me/runs/ddp-0001", points: int = 1, cwd: str = "/home/me/my project", **flags: Any
    ) -> str:
        plan = make_plan(loaded(**flags), gpu_site, Path(run), points=points)
        return batch_script(plan, Path(run), cwd=Path(cwd), python="/home/me/venv/bin/python", points=points)

    return make


def test_the_script_is_this_one(script: Callable[..., str]) -> None:
    assert script(nodes=2, gpus_per_node=4, account="thesis", setup=("module load cuda",)) == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("points", "flags"),
    [
        (1, {}),
        (1, {"gpus_per_node": 0, "ntasks_per_node": 2}),
        (4, {"nodes": 2}),
        (1, {"nodes": 2, "preflight": True}),
        (1, {"requeue": False, "srun": {"exact": "", "mpi": "none"}}),
    ],
)
def test_bash_and_shellcheck_find_no_fault(script: Callable[..., str], points: int, flags: dict[str, Any]) -> None:
    text = script(points=points, **flags)
    assert faults(text) == ""


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"points": 3}, 'export TRAINKIT_RUN_DIR=/home/me/runs/ddp-0001/"$SLURM_ARRAY_TASK_ID"\n'),
        ({"gpus_per_node": 0}, "export CUDA_VISIBLE_DEVICES=\n"),
        ({"requeue": False}, 'job end "$rc" --no-requeue || code=$?\nexit "$code"\n'),
        ({"run": "/home/my files/ddp-0001"}, "export TRAINKIT_RUN_DIR='/home/my files/ddp-0001'\n"),
    ],
)
def test_what_is_asked_for_is_in_this_line(script: Callable[..., str], flags: dict[str, Any], line: str) -> None:
    assert line in script(**flags)
    assert line not in GOLDEN.read_text()


@pytest.mark.parametrize("folder", ["/home/o'neil/run", '/home/"x"/run', "/home/a\\b/run", "/home/a\nb/run"])
def test_a_path_that_no_header_can_hold_is_refused(script: Callable[..., str], folder: str) -> None:
    with pytest.raises(UserError, match="cannot be written into a batch script"):
        script(run=folder)
