"""What ranks run in: variables that must not leak from a job into one submitted in it, and the user's Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# A job submitted inside a job (from salloc, from a notebook on a node) inherits its variables; its srun can then die,
# or be bound to the wrong CPUs, and its ranks would take themselves for those of the other job. What users set in
# SBATCH_* has become part of the plan, and as variables would outrank the flags in the script.
_LEAKS = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC|PMI|PMI2|PMIX|OMPI|TORCHELASTIC|SUBMITIT)_.*"
    r"|MPI_LOCAL.*|(GROUP_|ROLE_|LOCAL_|NODE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TRAINKIT_(RUN_DIR|ATTEMPT|SIMULATED_NODES|HEARTBEAT|SECRET|CLIENT)"
)
_KEPT = ("SLURM_CONF",)  # where the cluster is


def leaked(env: Mapping[str, str]) -> list[str]:
    """Names in ``env`` that describe a job or a rank, and must not reach a new one."""
    return sorted(name for name in env if _LEAKS.fullmatch(name) and name not in _KEPT)


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without those."""
    return {name: value for name, value in env.items() if name not in leaked({name: value})}


def gpu_mask(inherited: str | None, node: int, gpus_per_node: int) -> str:
    """CUDA_VISIBLE_DEVICES of a simulated node: its part of the devices that were visible; none for zero GPUs."""
    first, last = node * gpus_per_node, (node + 1) * gpus_per_node
    devices = [str(index) for index in range(last)] if inherited is None else inherited.split(",")
    return ",".join(devices[first:last])


def python_path(code: Path, env: Mapping[str, str]) -> str:
    """PYTHONPATH with the snapshot first."""
    return f"{code}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else str(code)


# A batch shell is no login shell, so `module` may be missing although the site has it.
_FIND_MODULES = """\
if ! command -v module > /dev/null; then
    for file in /etc/profile.d/{z00_lmod,lmod,modules}.sh /usr/share/{lmod/lmod,modules}/init/bash; do
        # shellcheck source=/dev/null
        if [ -r "$file" ]; then source "$file" || true; break; fi
    done
fi"""


def activation(environment: str | None, cwd: Path, python: str) -> tuple[list[str], str]:
    """Shell lines that make an environment the shell's own, and its interpreter as a word of the shell.

    Args:
        environment: ``venv:FOLDER``, ``conda:NAME``, ``uv:PROJECT``; None: what this program runs in.
        cwd: folders are relative to it.
        python: this interpreter.
    """
    if environment is None:
        return [], shlex.quote(python)
    kind, _, name = environment.partition(":")
    folder = str(cwd / Path(name).expanduser())
    if kind == "venv":
        quoted = shlex.quote(folder)
        return [f"export VIRTUAL_ENV={quoted}", 'export PATH="$VIRTUAL_ENV/bin:$PATH"'], shlex.quote(
            f"{folder}/bin/python"
        )
    if kind == "conda":
        where = shlex.quote(folder if "/" in name else name)
        lines = ['eval "$("${CONDA_EXE:-conda}" shell.bash hook)"', f"conda activate {where}"]
        return [*lines, 'python="$CONDA_PREFIX/bin/python"'], '"$python"'
    # As `uv sync` has left it: jobs of one project start at the same time, and must not change it under each other.
    # Asked for once, so that no process of uv's stands between srun's signals and the ranks.
    find = f"uv run --project {shlex.quote(folder)} --no-sync python -c 'import sys; print(sys.executable)'"
    return [f"python=$({find})"], '"$python"'


def module_lines(modules: Sequence[str]) -> list[str]:
    """Shell lines that load environment modules, of Lmod or of Environment Modules."""
    return [*_FIND_MODULES.splitlines(), f"module load {shlex.join(modules)}"] if modules else []
