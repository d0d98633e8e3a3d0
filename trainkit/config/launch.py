"""The section ``launch``: resources and scheduler options, in sbatch's own words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from trainkit.config.section import PLAIN, SENDS, STARTS, ImpossibleError, Section
from trainkit.config.slurm_options import long_name
from trainkit.config.times import time_minutes

ALWAYS_WRITTEN = (
    *("executor", "cluster", "nodes", "gpus_per_node", "ntasks_per_node", "cpus_per_task", "mem", "time", "partition"),
    *("account", "qos", "constraint", "nodelist", "exclude", "reservation", "gres", "job_name", "dependency"),
    *("mail_user", "mail_type", "requeue", "signal_seconds", "setup", "sbatch", "srun"),
)
"""What every version has written into the configuration that a run keeps, and nobody writes by hand. Keys that came
later an older run does not have."""


class LaunchConfig(Section):
    """Resources. The names are those of sbatch's flags, with underscores."""

    executor: Literal["auto", "slurm", "local", "debug"] = "auto"
    """auto: slurm where sbatch is found, else local. debug: in the calling process."""
    cluster: Annotated[str | None, STARTS] = None
    """A site profile: a name in configs/clusters or the path of a YAML file."""
    nodes: PositiveInt = 1
    gpus_per_node: NonNegativeInt | Literal["auto"] = "auto"
    """auto: what this machine or the partition has; 0: train on CPU."""
    gpu_dialect: Literal["gpus-per-node", "gres", "constraint"] = "gpus-per-node"
    """How the site wants GPUs asked for: --gpus-per-node, --gres=gpu:N, or by its --constraint alone."""
    gpu_type: Annotated[str | None, PLAIN] = None
    """Type of the GPUs, as the site calls it: a100. null: any."""
    ntasks_per_node: PositiveInt | None = None
    """Ranks per node; null: one per GPU, or one on CPU."""
    cpus_per_task: PositiveInt | None = None
    mem: Annotated[str | None, PLAIN] = None
    """Memory per node, as sbatch writes it: 32G, 500M; 0 for all."""
    time: Annotated[str, PLAIN] = "1:00:00"
    """Time limit, as sbatch writes it: minutes, H:MM:SS, D-HH:MM:SS."""
    partition: Annotated[str | None, PLAIN] = None
    account: Annotated[str | None, PLAIN] = None
    qos: Annotated[str | None, PLAIN] = None
    constraint: Annotated[str | None, PLAIN] = None
    nodelist: Annotated[str | None, PLAIN] = None
    exclude: Annotated[str | None, PLAIN] = None
    reservation: Annotated[str | None, PLAIN] = None
    gres: Annotated[str | None, PLAIN] = None
    """Generic resources, for sites that do not know --gpus-per-node: gpu:4, gpu:a100:4."""
    job_name: Annotated[str | None, PLAIN] = None
    """null: the preset's name."""
    dependency: Annotated[str | None, PLAIN] = None
    interface: Annotated[str | None, PLAIN] = None
    """Network interface for what the ranks of several nodes exchange, as in ib0; null: that of the route to the head
    node. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME outrank it."""
    max_parallel: PositiveInt | None = None
    """Runs of a sweep that SLURM may run at the same time; null: as many as it likes."""
    mail_user: Annotated[str | None, SENDS] = None
    mail_type: Annotated[str | None, PLAIN] = None
    requeue: bool | Literal["chain"] = True
    """Requeue after a time limit, a preemption or a failure that another start may mend, and go on from the newest
    checkpoint. chain: by a further job each time, for sites that forbid requeueing."""
    preflight: bool = False
    """Check the nodes before the ranks start, in the job itself; a bad one is named and excluded, and the job queued
    again."""
    hang_seconds: PositiveInt = 600
    """Ranks that make no progress for so long hang: the attempt is ended, and the one that is behind is named."""
    signal_seconds: PositiveInt | None = None
    """How long before the time limit the job is told to save; null: 90, or a third of a short limit."""
    internet: bool = True
    """Whether compute nodes reach the internet; false keeps W&B and model hubs offline there."""
    setup: Annotated[tuple[str, ...], STARTS] = ()
    """Shell lines before the job starts: module load, source ..."""
    modules: Annotated[tuple[str, ...], STARTS] = ()
    """Environment modules that a batch job loads first: [cuda/12.4]."""
    environment: Annotated[str | None, STARTS] = None
    """The Python of a batch job. null: the one that submits; venv:FOLDER, conda:NAME, uv:PROJECT."""
    container_image: Annotated[str | None, STARTS] = None
    """Run the ranks in a container: image.sif, image.sqsh, nvcr.io#nvidia/pytorch:25.01-py3, docker://..."""
    container_runtime: Literal["auto", "pyxis", "apptainer", "docker"] = "auto"
    """auto: apptainer for .sif files and URLs; of the rest pyxis on SLURM, docker without (jobs.launch)."""
    container_mounts: Annotated[tuple[str, ...], STARTS] = ()
    """Further folders that it sees, SOURCE:TARGET[:ro]; those of run, submission and data it sees anyway."""
    container_python: Annotated[str, STARTS] = "python3"
    """The interpreter inside, which has torch and the other packages that trainkit needs."""
    sbatch: Annotated[dict[str, str], STARTS] = {}  # noqa: RUF012  pydantic copies defaults
    """Further sbatch options without their dashes: {comment: thesis}."""
    srun: Annotated[dict[str, str], STARTS] = {}  # noqa: RUF012
    """Further srun options without their dashes."""

    def lead_seconds(self) -> int:
        """Seconds before the time limit at which the job is told to save."""
        return self.signal_seconds or max(5, min(90, int(time_minutes(self.time) * 60 / 3)))

    @field_validator("*", mode="before")
    @classmethod
    def _on_one_line(cls, value: Any) -> Any:
        # All of it goes into the batch script: a line break would begin a line of its own there.
        if not all(is_one_line(text) for text in _texts(value)):
            raise ValueError("text on one line, without control characters")
        return value

    @field_validator("time", mode="before")
    @classmethod
    def _minutes_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("time")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        time_minutes(value)
        return value

    @field_validator("mem", mode="before")
    @classmethod
    def _mem_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("mem")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\d+[KMGT]?B?", value):
            raise ValueError("a size as sbatch writes it: 32G, 500M, 0")
        return value

    @field_validator("sbatch", "srun", mode="before")
    @classmethod
    def _values_as_text(cls, value: Any) -> Any:
        if isinstance(value, dict):
            # {exclusive: true} is the bare --exclusive; {exclusive: false} is none.
            return {
                str(key): "" if item is None or item is True else str(item)
                for key, item in value.items()
                if item is not False
            }
        return value

    @field_validator("sbatch", "srun")
    @classmethod
    def _are_option_names(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if not all(re.fullmatch(r"[A-Za-z][\w-]*", key) for key in value):
            raise ValueError("options without their dashes, as in {comment: thesis}")
        return {long_name(str(info.field_name), key): text for key, text in value.items()}

    @field_validator("environment")
    @classmethod
    def _is_an_environment(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(venv|conda|uv):.+", value):
            raise ValueError("venv:FOLDER, conda:NAME or uv:PROJECT")
        return value

    @field_validator("container_image")
    @classmethod
    def _or_none(cls, value: str | None) -> str | None:
        return None if value in ("", "none") else value  # against a profile's or a run's own

    @model_validator(mode="after")
    def _combinations(self) -> LaunchConfig:
        if self.gres is not None and "gpu" in self.gres and isinstance(self.gpus_per_node, int):
            raise ImpossibleError(
                "launch.gres and launch.gpus_per_node both ask for GPUs",
                keys=("launch.gres", "launch.gpus_per_node"),
                why="A site knows one of them.",
                fix="Give one of them.",
            )
        memory = [name for name in ("mem-per-cpu", "mem-per-gpu") if name in self.sbatch] + ["mem"] * (
            self.mem is not None
        )
        if len(memory) > 1:
            raise ImpossibleError(
                f"--{' and --'.join(memory)} both ask for memory",
                keys=("launch.sbatch", "launch.mem"),
                why="sbatch takes one of them.",
                fix="Give one of them; unset a variable SBATCH_MEM_PER_... that is in the way.",
            )
        seconds = time_minutes(self.time) * 60
        if self.signal_seconds is not None and self.signal_seconds * 2 > seconds:
            raise ImpossibleError(
                f"launch.signal_seconds={self.signal_seconds} is more than half of launch.time={self.time}",
                keys=("launch.signal_seconds", "launch.time"),
                why="The job would be told to save soon after it starts.",
                fix=f"Use launch.signal_seconds={max(1, int(seconds / 3))}, or ask for more time.",
            )
        return self


def is_one_line(text: str) -> bool:
    """Whether it has no line break and no other control character, but for tabs."""
    return all(char == "\t" or unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp") for char in text)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value as YAML gives it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(item)
