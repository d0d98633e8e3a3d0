"""The configuration: a frozen tree of sections, one field for one setting.

Frozen means that a value printed at submission is the value used at step 10,000. Numbers that follow from others
(``grad_accum_steps``, the total number of steps) are functions of them and are not stored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from trainkit.config.section import ImpossibleError, PluginSection, Section

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def time_minutes(text: str) -> float:
    """Minutes of a time as sbatch writes it: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.

    Raises ValueError for anything else, and for zero.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError("a time as sbatch writes it: 30 (minutes), 2:00:00, 1-12:00:00")
    days, *rest = match.groups()
    a, b, c = (int(part) if part else 0 for part in rest)
    if days is not None:
        minutes = int(days) * 1440 + a * 60 + b + c / 60
    elif rest[2] is not None:
        minutes = a * 60 + b + c / 60
    else:
        minutes = a + b / 60
    if minutes <= 0:
        raise ValueError("a time above zero")
    return minutes


class ModelConfig(PluginSection):
    name: str = "fashion_cnn"
    """fashion_cnn, any timm or torchvision name, or package.module:function of your own."""


class DataConfig(PluginSection):
    name: str = "digits"
    """digits, fashion_mnist, cifar10, cinic10, imagenet, image_folder, synthetic, or package.module:function."""
    root: str = "data"
    """Folder of the data sets; relative to where the command is given."""
    workers: NonNegativeInt | Literal["auto"] = "auto"
    """DataLoader processes per rank. auto: the CPUs of the rank, none for data that fits in memory."""


class TrainConfig(Section):
    epochs: PositiveInt = 20
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Optimizer updates; replaces `epochs` when given."""
    global_batch_size: PositiveInt = 64
    """Samples per optimizer update over all ranks. Keep it fixed when you change the number of GPUs."""
    micro_batch_size: PositiveInt | None = None
    """Samples per rank per forward pass; null: the rank's whole share at once. Lower it when memory runs out."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """auto picks what the device is fast at; fp16 scales the loss."""
    grad_clip_norm: PositiveFloat | None = None
    """Largest global norm of the gradients; null: no clipping."""
    label_smoothing: Fraction = 0.0
    eval_every_epochs: PositiveInt = 1
    """Validate after every so many epochs, and always at the end."""


class OptimConfig(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: PositiveFloat = 2.0e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.05
    """Applied to matrices and filters only, not to biases and norms."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW only."""
    momentum: Fraction = 0.9
    """SGD only."""
    nesterov: bool = False
    """SGD only."""


class ScheduleConfig(Section):
    name: Literal["onecycle", "cosine", "constant"] = "onecycle"
    warmup_epochs: NonNegativeFloat = 1.0
    """Epochs from a small rate up to optim.lr, counted per update; at most half of the run."""
    final_lr_ratio: Fraction = 0.0
    """The last learning rate as a fraction of optim.lr (cosine and onecycle)."""


class StrategyConfig(PluginSection):
    name: str = "ddp"
    """single, dp, ddp, fsdp, hivemind, or package.module:function of your own."""


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = None
    """Save after every so many updates as well."""
    every_epochs: PositiveInt | None = 1
    """Save after every so many epochs."""
    keep: PositiveInt = 3
    """How many checkpoints to keep besides the best."""
    best: Literal["val/acc1", "val/acc5", "val/loss"] = "val/acc1"
    """What `best` is judged by."""


LoggerName = Literal["console", "jsonl", "tensorboard", "wandb"]


class MonitorConfig(Section):
    loggers: tuple[LoggerName, ...] = ("console", "jsonl", "tensorboard", "wandb")
    """Where records go: names in trainkit/monitor."""
    log_every: PositiveInt = 10
    """Updates between two training records."""
    wandb_project: str = "trainkit"
    hardware_every_seconds: PositiveFloat = 5.0
    """Seconds between two samples of GPU and CPU use."""


class LaunchConfig(Section):
    """Resources. The names are those of sbatch's flags, with underscores."""

    executor: Literal["auto", "slurm", "local", "debug"] = "auto"
    """auto: slurm where sbatch is found, else local. debug: in the calling process."""
    cluster: str | None = None
    """A site profile: a name in configs/clusters or the path of a YAML file."""
    nodes: PositiveInt = 1
    gpus_per_node: NonNegativeInt | Literal["auto"] = "auto"
    """auto: what this machine or the partition has; 0: train on CPU."""
    ntasks_per_node: PositiveInt | None = None
    """Ranks per node; null: one per GPU, or one on CPU."""
    cpus_per_task: PositiveInt | None = None
    mem: str | None = None
    """Memory per node, as sbatch writes it: 32G, 500M; 0 for all."""
    time: str = "1:00:00"
    """Time limit, as sbatch writes it: minutes, H:MM:SS, D-HH:MM:SS."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    gres: str | None = None
    """Generic resources, for sites that do not know --gpus-per-node: gpu:4, gpu:a100:4."""
    job_name: str | None = None
    """null: the preset's name."""
    dependency: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    requeue: bool = True
    """Requeue after a time limit or a preemption, and go on from the last checkpoint."""
    signal_seconds: PositiveInt | None = None
    """How long before the time limit the job is told to save; null: 90, or a third of a short limit."""
    setup: tuple[str, ...] = ()
    """Shell lines before the job starts: module load, source ..."""
    sbatch: dict[str, str] = {}  # noqa: RUF012  pydantic copies defaults
    """Further sbatch options without their dashes: {comment: thesis}."""
    srun: dict[str, str] = {}  # noqa: RUF012
    """Further srun options without their dashes."""

    def lead_seconds(self) -> int:
        """Seconds before the time limit at which the job is told to save."""
        return self.signal_seconds or max(5, min(90, int(time_minutes(self.time) * 60 / 3)))

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

    @model_validator(mode="after")
    def _combinations(self) -> LaunchConfig:
        if self.gres is not None and "gpu" in self.gres and isinstance(self.gpus_per_node, int):
            raise ImpossibleError(
                "launch.gres and launch.gpus_per_node both ask for GPUs",
                keys=("launch.gres", "launch.gpus_per_node"),
                why="A site knows one of them.",
                fix="Give one of them.",
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


class CollaborativeConfig(Section):
    sync: Literal["diloco"] = "diloco"
    """How peers agree: diloco averages the progress of a round."""
    round_seconds: PositiveFloat = 60.0
    """Length of a round; every peer trains as many updates as it can in it."""
    rounds: PositiveInt = 20
    """The run ends after so many rounds."""
    matchmaking_seconds: PositiveFloat = 3.0
    """How long before the end of a round peers look for one another."""
    outer_lr: PositiveFloat = 0.7
    outer_momentum: Fraction = 0.9
    compression: Literal["fp16", "none"] = "fp16"
    """What peers send: fp16 halves the traffic."""
    initial_peers: tuple[str, ...] = ()
    """Addresses of peers to join; `join ADDRESS` sets them."""
    port: NonNegativeInt = 0
    """Port of the first peer; 0: any free one."""

    @model_validator(mode="after")
    def _round_holds_matchmaking(self) -> CollaborativeConfig:
        if self.round_seconds < self.matchmaking_seconds + 1:
            raise ImpossibleError(
                f"collaborative.round_seconds={self.round_seconds:g} leaves no time to train before "
                f"collaborative.matchmaking_seconds={self.matchmaking_seconds:g}",
                keys=("collaborative.round_seconds", "collaborative.matchmaking_seconds"),
                why="Peers look for one another at the end of every round.",
                fix=f"Use collaborative.round_seconds={self.matchmaking_seconds + 1:g} or more.",
            )
        return self


class Config(Section):
    """A whole run."""

    seed: NonNegativeInt = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    strategy: StrategyConfig = StrategyConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    launch: LaunchConfig = LaunchConfig()
    collaborative: CollaborativeConfig = CollaborativeConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        train, launch = self.train, self.launch
        batch, micro = train.global_batch_size, train.micro_batch_size
        if micro is not None and batch % micro:
            possible = [size for size in (batch // micro * micro, (batch // micro + 1) * micro) if size]
            raise ImpossibleError(
                f"train.global_batch_size={batch} is not a multiple of train.micro_batch_size={micro}",
                keys=("train.global_batch_size", "train.micro_batch_size"),
                why="An update takes whole micro batches.",
                fix=f"Use train.global_batch_size={' or '.join(map(str, possible))}.",
            )
        if self.strategy.name in ("single", "dp"):
            for name, count in (("nodes", launch.nodes), ("ntasks_per_node", launch.ntasks_per_node or 1)):
                if count > 1:
                    raise ImpossibleError(
                        f"strategy.name={self.strategy.name} cannot run with launch.{name}={count}",
                        keys=("strategy.name", f"launch.{name}"),
                        why=f"{self.strategy.name} is one process on one node.",
                        fix=f"Use strategy.name=ddp or fsdp, or launch.{name}=1.",
                    )
        return self


SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}


def field_of(key: str) -> FieldInfo | None:
    """The declaration of a dotted key; None for options of plugins and for keys that do not exist."""
    section, _, name = key.rpartition(".")
    if not section:
        return Config.model_fields.get(name)
    return SECTIONS[section].model_fields.get(name) if section in SECTIONS else None
