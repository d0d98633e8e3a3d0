"""The variables that launchers set: read with errors that name them, and what several launchers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from trainkit.errors import UserError
from trainkit.ranks.hostlist import expand
from trainkit.ranks.rendezvous import derived_port

# Step ids from here on are SLURM's own: the shell of salloc (interactive), the batch script, external, pending.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

HAND_SET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_srun_task(env: Mapping[str, str]) -> bool:
    """Not the shell of salloc (no PROCID, or an interactive step) nor the batch script (PROCID 0, no numbered step)."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in env and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def is_job_shell(env: Mapping[str, str]) -> bool:
    """A batch script, or a shell in an allocation: MASTER_ADDR exported there is for the tasks it will start."""
    return "SLURM_JOB_ID" in env and "RANK" not in env


def slurm_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Hosts of the step, else of the job; empty outside SLURM."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return tuple(expand(env[name]))
    return ()


def job_port(env: Mapping[str, str]) -> int:
    """The port where the ranks of a job meet, when nobody has set one."""
    # All ranks must agree without a message, so from what all of them see: the job, its step, how often it restarted.
    for name in ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "AZ_BATCH_JOB_ID"):
        if env.get(name):
            restarts = env.get("SLURM_RESTART_COUNT") or "0"
            return derived_port(f"{env[name]}.{env.get('SLURM_STEP_ID', '')}", int(restarts))
    return derived_port("", 0)


def is_loopback(addr: str) -> bool:
    """Whether the address is this machine's own."""
    return addr == "localhost" or addr == "::1" or addr.startswith("127.")


@dataclass(frozen=True)
class Reader:
    """Variables of one launcher, with errors that name them."""

    env: Mapping[str, str]
    launcher: str

    def text(self, name: str, default: str | None = None) -> str:
        """A variable's value, or the default; without one, UserError when it is not set."""
        value = self.env.get(name, "")
        return value or (self.missing(name) if default is None else default)

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0; otherwise UserError."""
        value = self.text(name, None if default is None else str(default))
        if not value.isdecimal():
            raise UserError(
                f"{name}='{value}' is not a number.",
                why=f"This process was started as a rank ({self.launcher}), and {name} says which.",
                fix=f"Set {name} to a number, or unset it.",
            )
        return int(value)

    def missing(self, name: str) -> NoReturn:
        """Raise the UserError for a set of variables without ``name``."""
        there = [other for other in SETS[self.launcher] if other in self.env]
        raise UserError(
            f"{name} is not set, so this process cannot tell its place among the ranks.",
            why=f"Only part of a set is there ({self.launcher}): {', '.join(there)}.",
            fix=f"Set {name} too, or unset the others to run as a single process.",
        )


SETS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", *HAND_SET, "LOCAL_WORLD_SIZE"),
    "manual": (*HAND_SET, "LOCAL_WORLD_SIZE"),
    "submitit-local": ("SUBMITIT_EXECUTOR", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS"),
    "mpi": (
        *(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"),
}
