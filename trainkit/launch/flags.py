"""Launch settings as keywords of functions, as ``trainkit.submit("ddp", nodes=2)`` takes them."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class LaunchFlags(TypedDict, total=False):
    """The fields of `trainkit.config.schema.LaunchConfig`, which explains them; None means not given."""

    executor: str | None
    cluster: str | None
    nodes: int | None
    spare_nodes: int | None
    gpus_per_node: int | Literal["auto"] | None
    gpu_dialect: Literal["gpus-per-node", "gres", "constraint"] | None
    gpu_type: str | None
    ntasks_per_node: int | None
    cpus_per_task: int | None
    mem: str | int | None
    time: str | int | None
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    nodelist: str | None
    exclude: str | None
    reservation: str | None
    gres: str | None
    job_name: str | None
    dependency: str | None
    interface: str | None
    runs_per_gpu: int | None
    max_parallel: int | None
    notify: Sequence[str] | None
    mail_user: str | None
    mail_type: str | None
    requeue: bool | Literal["chain", "always", "expedite"] | None
    restart_in_place: bool | None
    on_restart: str | None
    stop_signal: Literal["USR2", "USR1", "TERM", "INT"] | None
    stop_exit_code: int | None
    preflight: bool | None
    hang_seconds: int | None
    idle_minutes: float | None
    signal_seconds: int | None
    internet: bool | None
    carbon_intensity: float | str | None
    gpu_hour_price: str | None
    setup: Sequence[str] | None
    modules: Sequence[str] | None
    environment: str | None
    container_image: str | None
    container_runtime: Literal["auto", "pyxis", "apptainer", "docker"] | None
    container_mounts: Sequence[str] | None
    container_python: str | None
    sbatch: Sequence[str] | Mapping[str, str] | None
    srun: Sequence[str] | Mapping[str, str] | None
