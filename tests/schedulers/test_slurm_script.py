from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shell import faults
from trainkit.config.loading import Loaded
from trainkit.errors import UserError
from trainkit.launch.plan import make_plan
from trainkit.schedulers.slurm_script import batch_script
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


def test_header_lines_follow_the_first_line_at_once(script: Callable[..., str]) -> None:
    lines = script().splitlines()
    header = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert header == list(range(1, len(header) + 1)), "sbatch stops reading options at the first command"


def test_the_signal_is_for_the_ranks_and_not_for_the_shell(script: Callable[..., str]) -> None:
    assert "#SBATCH --signal=USR2@90\n" in script()


def test_a_sweep_takes_the_run_folder_of_its_array_index(script: Callable[..., str]) -> None:
    text = script(points=3)
    assert 'export TRAINKIT_RUN_DIR=/home/me/runs/ddp-0001/"$SLURM_ARRAY_TASK_ID"\n' in text
    assert "/home/me/runs/ddp-0001/.submitit" in text, "the pickles of all runs lie together"


def test_a_run_on_the_cpu_hides_the_gpus(script: Callable[..., str]) -> None:
    assert "export CUDA_VISIBLE_DEVICES=\n" in script(gpus_per_node=0)
    assert "CUDA_VISIBLE_DEVICES" not in script(gpus_per_node=4)


def test_setup_lines_run_before_ours_and_without_nounset(script: Callable[..., str]) -> None:
    text = script(setup=("source env.sh",))
    assert "set +u\nsource env.sh\nset -u\n" in text
    assert text.index("source env.sh") < text.index("PYTHONPATH")


def test_without_requeue_nothing_is_requeued(script: Callable[..., str]) -> None:
    text = script(requeue=False)
    assert "#SBATCH --no-requeue\n" in text
    assert text.endswith('job end "$rc" --no-requeue || code=$?\nexit "$code"\n')


def test_further_srun_options_are_passed_on(script: Callable[..., str]) -> None:
    assert "    --mpi=pmix \\\n" in script(srun={"mpi": "pmix"})


def test_paths_with_spaces_are_quoted(script: Callable[..., str]) -> None:
    text = script(run="/home/my files/ddp-0001")
    assert "#SBATCH --output='/home/my files/ddp-0001/logs/batch.out'\n" in text
    assert "export TRAINKIT_RUN_DIR='/home/my files/ddp-0001'\n" in text


@pytest.mark.parametrize("folder", ["/home/o'neil/run", '/home/"x"/run', "/home/a\\b/run", "/home/a\nb/run"])
def test_a_path_that_no_header_can_hold_is_refused(script: Callable[..., str], folder: str) -> None:
    with pytest.raises(UserError, match="cannot be written into a batch script"):
        script(run=folder)
