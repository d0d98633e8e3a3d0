"""The sbatch templates as texts: what a helpdesk reads, and what SLURM must be told."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.runs import script
from tests.shell import faults

SLURM = Path(__file__).parents[2] / "slurm"
SCRIPTS = ("train.sbatch", "train_torchrun.sbatch", "hivemind_peer.sbatch", "script.sbatch", "devcluster")
TEMPLATES = SCRIPTS[:4]


def text(template: str) -> str:
    return (SLURM / template).read_text(encoding="utf-8")


def commands(template: str) -> str:
    """The script without comments, continued lines joined."""
    lines = [line for line in text(template).splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_and_shellcheck_find_no_fault(name: str) -> None:
    assert faults(text(name)) == ""


def test_the_token_of_a_peer_is_no_argument_that_others_on_the_node_can_read() -> None:
    assert " --join --run-dir " in commands("hivemind_peer.sbatch")
    assert "$TRAINKIT_TOKEN" not in commands("hivemind_peer.sbatch")


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_every_template_has_in_common(template: str) -> None:
    edited = re.findall(r"^.*CHANGE_ME.*$", text(template), re.M)
    assert edited == ["#SBATCH --account=CHANGE_ME", "#SBATCH --partition=CHANGE_ME"]
    header, body = text(template).split("set -euo pipefail")
    for directive in ("--signal=USR2@90", "--requeue", "--open-mode=append"):
        assert f"#SBATCH {directive}\n" in header
    assert "#SBATCH --" not in body, "sbatch silently ignores what comes after the first command"
    said = commands(template)
    assert said.rstrip().endswith('trainkit.launch.batch_job end "$rc"'), "the job ends with the code of its ranks"
    assert "srun --kill-on-bad-exit=1 " in said, "one failed rank ends the step"
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in said
    # The batch shell has SLURM_PROCID=0 and SLURM_NODEID=0 too: expanded there, every rank would be the first.
    # torchrun's `node` function is expanded by the node's shell.
    batch_shell = re.sub(r"^\w+\(\) \{.*?^\}", "", said, flags=re.M | re.S)
    assert not re.findall(r"SLURM_(?:PROCID|NODEID|LOCALID)", batch_shell)
    # A failure to begin ends the script: `eval "$(...)"` would go on.
    assert '\nbegun=$("$python" -m trainkit.launch.batch_job begin)\neval "$begun"\n' in said


@pytest.mark.parametrize("template", TEMPLATES)
def test_who_queues_it_elsewhere_is_told_what_lacks(template: str, tmp_path: Path) -> None:
    own = {"PATH": "/usr/bin:/bin", "CONDA_PREFIX": str(tmp_path), "TRAINKIT_TOKEN": "token"}
    script(tmp_path / "bin" / "python", "exit 1")
    bash = ["bash", str(SLURM / template), "ddp"]
    done = subprocess.run(bash, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no trainkit: call sbatch in the project's folder" in done.stderr


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "2"}, "4"),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, "2"),
        ({"SLURM_GPUS_PER_NODE": "0"}, "1"),
        ({"SLURM_GPUS_ON_NODE": "0"}, "1"),
        ({}, "1"),
    ],
)
def test_torchrun_starts_a_rank_for_each_gpu_or_one_on_the_cpu(variables: dict[str, str], ranks: str) -> None:
    (function,) = re.findall(r"^ranks\(\) \{.*?^\}", text("train_torchrun.sbatch"), re.M | re.S)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{function}\nranks"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ranks


@pytest.mark.parametrize("template", TEMPLATES[:2])
def test_the_run_is_made_before_anything_begins_that_is_written_down(template: str) -> None:
    make = '"$python" -m trainkit train "$preset" "$@" --run-dir "$TRAINKIT_RUN_DIR" --make\nbegun='
    assert make in commands(template)
