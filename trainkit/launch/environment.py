"""Environment variables: what must not leak from a job into one submitted in it, and what each rank is given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

# A job submitted inside a job (from salloc, from a notebook on a node) inherits its variables; its srun can then die,
# or be bound to the wrong CPUs, and its ranks would take themselves for those of the other job. What users set in
# SBATCH_* has become part of the plan, and as variables would outrank the flags in the script.
_LEAKS = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC|PMI|PMI2|PMIX|OMPI|TORCHELASTIC|SUBMITIT)_.*"
    r"|MPI_LOCAL.*|(GROUP_|ROLE_|LOCAL_|NODE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TRAINKIT_(RUN_DIR|ATTEMPT|SIMULATED_NODES|HEARTBEAT|SECRET)"
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
