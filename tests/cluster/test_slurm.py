"""The batch script that SLURM is given, to the letter."""

import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import GPU_SITE
from tests.runs import script as program
from tests.shell import faults
from trainkit.cluster.pickles import TASK
from trainkit.cluster.slurm_submission import batch_script
from trainkit.common.errors import UserError
from trainkit.config.loading import Loaded
from trainkit.launch.planning import make_plan

GOLDEN = Path(__file__).with_name("golden")
CASES: dict[str, dict[str, Any]] = {
    "venv": {"environment": "venv:envs/vision"},
    "conda": {"environment": "conda:vision"},
    "uv": {"environment": "uv:/home/me/vision"},
    "modules": {"modules": ("cuda/12.4", "python/3.12"), "setup": ("ulimit -c 0",), "environment": "venv:~/vision"},
    "pyxis": {"container_image": "nvcr.io#nvidia/pytorch:25.01-py3", "srun": {"mpi": "pmix"}},
    "apptainer": {"container_image": "/images/torch.sif", "container_mounts": ("/scratch", "/work/me:/data:ro")},
    "apptainer-cpu": {"container_image": "docker://python:3.12", "gpus_per_node": 0, "container_python": "/opt/py"},
    "cpu": {"gpus_per_node": 0, "ntasks_per_node": 2},
    "sweep": {"points": 3, "nodes": 2},
    "spaces": {"run": "/home/my files/ddp-0001"},
    "words": {"account": "", "job_name": "it's $HOME's {{ ☃ }}", "setup": ("export A='{% b %}'  # {# c #}",)},
    "preflight": {"nodes": 2, "preflight": True},
    "spare": {"nodes": 1, "spare_nodes": 1, "preflight": True},
    "once": {"requeue": False, "srun": {"exact": "", "mpi": "none"}},
}


@pytest.fixture
def script(loaded: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("HOME", "/home/me")

    def make(
        cwd: str = "/home/me/my project", run: str = "/home/me/runs/ddp-0001", points: int = 1, **flags: Any
    ) -> str:
        plan = make_plan(loaded(**{"gpus_per_node": 4, **flags}), GPU_SITE, Path(run), points=points)
        return batch_script(plan, Path(run), Path(cwd), points, python="/home/me/venv/bin/python")

    return make


def test_the_script_is_this_one(script: Callable[..., str]) -> None:
    text = script(nodes=2, account="thesis", setup=("module load cuda",))
    golden = GOLDEN / "plain.sbatch"
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_setting_changes_these_lines_of_the_script_and_no_others(script: Callable[..., str], name: str) -> None:
    plain, text = script(), script(**CASES[name])
    assert faults(text) == "", "bash or shellcheck finds a fault"
    lines = difflib.unified_diff(plain.splitlines(), text.splitlines(), lineterm="", n=0)
    changes = "".join(f"{line}\n" for line in list(lines)[2:] if not line.startswith("@@"))
    changes = changes.replace(shlex.quote(TASK), "TASK")
    golden = GOLDEN / f"{name}.diff"
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(changes)
    assert changes == golden.read_text()


@pytest.mark.parametrize("folder", ["/home/o'neil/run", '/home/"x"/run', "/home/a\\b/run", "/home/a\nb/run"])
def test_a_path_that_no_header_can_hold_is_refused(script: Callable[..., str], folder: str) -> None:
    with pytest.raises(UserError, match="cannot be written into a batch script"):
        script(run=folder)


def run_job(script: Callable[..., str], environment: str, cwd: Path, **env: str) -> str:
    """Return the prefix of the interpreter of a job in an environment, or the shell's complaint."""
    text = script(str(cwd), environment=environment)
    lines = text[text.index("set +u") : text.index("set -u\n\n")]
    (word,) = re.findall(r"^job\(\) .*exec (.*) -P -m trainkit", text, flags=re.MULTILINE)
    text = "\n".join(["set -eo pipefail", lines, "set -u", f"{word} -c 'import sys; print(sys.prefix)'"])
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


def test_a_virtual_environment_is_the_jobs(script: Callable[..., str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "my env"], check=True)
    assert run_job(script, "venv:my env", tmp_path, PATH=os.environ["PATH"]) == str(tmp_path / "my env")


@pytest.mark.parametrize(("name", "asked"), [("vision", "vision"), ("envs/vision", "{cwd}/envs/vision")])
def test_conda_activates_by_its_own_hook_and_is_found_without_a_login_shell(
    script: Callable[..., str], tmp_path: Path, name: str, asked: str
) -> None:
    hook = f'conda() {{ [ "$*" = "activate {asked.format(cwd=tmp_path)}" ] && export CONDA_PREFIX={tmp_path}; }}'
    conda = tmp_path / "miniforge" / "conda"
    program(conda, f"[ \"$*\" = 'shell.bash hook' ] && echo '{hook}'")
    program(tmp_path / "bin" / "python", "echo python of $CONDA_PREFIX")
    said = run_job(script, f"conda:{name}", tmp_path, PATH=os.environ["PATH"], CONDA_EXE=str(conda))
    assert said == f"python of {tmp_path}"


def test_a_conda_that_is_not_there_ends_the_script(script: Callable[..., str], tmp_path: Path) -> None:
    assert "conda: command not found" in run_job(script, "conda:vision", tmp_path, PATH="/usr/bin:/bin")


def test_uv_is_asked_once_and_changes_nothing(script: Callable[..., str], tmp_path: Path) -> None:
    says = f'echo "$*" >> {tmp_path}/calls\nshift 4\n[ "$1" = python ] && shift\n{sys.executable} "$@"'
    program(tmp_path / "uv", says)
    assert run_job(script, "uv:project", tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}") == sys.prefix
    assert (tmp_path / "calls").read_text().startswith(f"run --project {tmp_path}/project --no-sync python -c")


def test_modules_are_loaded_also_where_the_batch_shell_does_not_know_how(script: Callable[..., str]) -> None:
    text = script(modules=("cuda/12.4",))
    begin, end = text.index("set +u"), text.index("set -u\n\n")
    lines = text[begin:end].replace("/etc/profile.d/{z00_lmod,lmod,modules}.sh", "./lmod.sh")
    Path("lmod.sh").write_text('module() { echo "module $*"; }\nfalse\n')
    done = subprocess.run(["bash", "-ec", lines], capture_output=True, text=True, check=True)
    assert done.stdout == "module load cuda/12.4\n"


RUNS_PYTHON = """\
case "$*" in
    *"batch_job begin"*) verb=begin; says='umask 0022; export TRAINKIT_ATTEMPT=0 TRAINKIT_NODELIST=n1' ;;
    *"batch_job end"*--without-ranks) verb=end ;;
    *"batch_job end 137"*) verb=end; says='umask 0022; export TRAINKIT_ATTEMPT=1' ;;
    *batch_job*) verb=preflight ;;
    *) exit ;;
esac
[ ! "$verb" = "$MOMENT" ] || kill "-$SENT" "$SCRIPT"
echo "$*" >>calls
echo "${says:-}"
"""
"""What a batch script starts as Python; it sends the script a signal while it does so."""


@pytest.mark.parametrize(("sent", "code"), [("TERM", 143), ("USR2", 140)])
@pytest.mark.parametrize(
    ("name", "moment"), [("once", "begin"), ("preflight", "preflight"), ("spare", "preflight"), ("spare", "end")]
)
def test_a_script_told_to_stop_without_ranks_starts_none(
    script: Callable[..., str], tmp_path: Path, name: str, moment: str, sent: str, code: int
) -> None:
    run = tmp_path / "run"
    (run / "code").mkdir(parents=True)
    for number in (0, 1):
        (run / "logs" / str(number)).mkdir(parents=True)
    program(tmp_path / "python", RUNS_PYTHON)
    program(tmp_path / "srun", 'case "$*" in *.submitit*) echo ranks >>calls; exit 137 ;; esac')
    text = script(str(tmp_path), str(run), **CASES[name])
    text = text.replace("/home/me/venv/bin/python", f"{tmp_path}/python")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MOMENT": moment, "SENT": sent, "SLURM_CPUS_PER_TASK": "1"}
    subprocess.run(["bash", "-c", f"export SCRIPT=$$\n{text}"], env=env, timeout=60, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count("ranks") == (moment == "end")
    options = {"once": ["--no-requeue"], "preflight": [], "spare": ["--in-place"]}[name]
    assert calls[-1].split()[3:] == ["end", str(code), *options, "--without-ranks"]
