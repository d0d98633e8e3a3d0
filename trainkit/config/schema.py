"""The configuration: a frozen tree of sections, one field for one setting.

Frozen means that a value printed at submission is the value used at step 10,000. Numbers that follow from others
(``grad_accum_steps``, the total number of steps) are functions of them and are not stored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

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

from trainkit.config.augment import AugmentConfig
from trainkit.config.checkpoint import CheckpointConfig
from trainkit.config.combinations import check_combinations
from trainkit.config.launch import LaunchConfig
from trainkit.config.section import IMPORTS, PLAIN, SENDS, Fraction, ImpossibleError, PluginSection, Reach, Section
from trainkit.config.train import TrainConfig

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what torch, numpy and scikit-learn all take
Port = Annotated[int, Field(ge=0, le=65535)]


class ModelConfig(PluginSection):
    # Options of timm's that name weights which it may unpickle.
    UNPICKLED: ClassVar[tuple[str, ...]] = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")

    name: Annotated[str, IMPORTS] = "fashion_cnn"
    """fashion_cnn, any timm or torchvision name, or package.module:function of your own."""
    checkpoint: Annotated[str | None, PLAIN] = None
    """A file of weights to start from (.safetensors, .pth, .pt): fine-tuning. A head for other classes starts anew."""
    freeze: Annotated[tuple[str, ...], PLAIN] = ()
    """Parameters that are not trained, by name: ["patch_embed.*", "blocks.[0-5].*"]; norms in them keep their
    statistics."""


class DataConfig(PluginSection):
    name: Annotated[str, IMPORTS] = "digits"
    """A data set: a file in trainkit/data (`python -m jobs.prepare --help` lists them), or package.module:function."""
    root: Annotated[str, PLAIN] = "data"
    """Folder of the data sets; relative to where the command is given."""
    workers: NonNegativeInt | Literal["auto"] = "auto"
    """DataLoader processes per rank. auto: the CPUs of the rank, none for data that fits in memory."""
    device: Literal["auto", "cpu"] = "auto"
    """Where data that fits in memory lies. auto: on the GPU, if it takes less than a tenth of what is free there."""
    pack: PositiveInt | None = None
    """Read the images from the pack that `python -m jobs.prepare DATASET --pack 256` has made: their shorter side."""
    stage: bool | Literal["auto"] = False
    """Copy the pack to this node's own disk first ($SLURM_TMPDIR, $TMPDIR), once a node. auto: where there is room."""
    max_broken: NonNegativeInt = 0
    """So many images that cannot be decoded are skipped: another stands in; evaluation leaves them out of its counts.
    One more ends the run."""

    @model_validator(mode="after")
    def _only_packs_are_staged(self) -> DataConfig:
        if self.stage is not False and self.pack is None:
            raise ImpossibleError(
                f"data.stage={str(self.stage).lower()} without data.pack",
                keys=("data.stage", "data.pack"),
                why="Only packs are copied to a node's own disk: one large file instead of a million small ones.",
                fix="Make one by `python -m jobs.prepare DATASET --pack 256`, and set data.pack=256.",
            )
        return self


class OptimConfig(Section):
    name: Literal["adamw", "sgd", "lamb", "muon"] = "adamw"
    """lamb: for very large batches; muon: for matrices and filters, AdamW for the rest."""
    lr: PositiveFloat = 2.0e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.05
    """Applied to matrices and filters only, not to biases and norms."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Layers nearer to the image learn slower: each at so much of the next one's rate. 0.65 to 0.8 is usual for
    fine-tuning vision transformers; 1: all alike."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """All but SGD."""
    momentum: Fraction = 0.9
    """SGD and Muon, for which 0.95 is usual."""
    nesterov: bool = False
    """SGD and Muon."""


class ScheduleConfig(Section):
    name: Literal["onecycle", "cosine", "constant", "step", "wsd"] = "onecycle"
    """wsd: warm up, stay, decay at the end."""
    warmup_epochs: NonNegativeFloat = 1.0
    """Epochs from a small rate up to optim.lr, counted per update; at most half of the run."""
    final_lr_ratio: Fraction = 0.0
    """The last learning rate as a fraction of optim.lr (cosine, onecycle and wsd)."""
    step_epochs: PositiveFloat = 30.0
    """Epochs between two falls (step only)."""
    gamma: Fraction = 0.1
    """What is left of the rate at each fall (step only)."""
    decay_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The part of the run in which the rate falls (wsd only); at most what the warm-up leaves."""


class StrategyConfig(PluginSection):
    name: Annotated[str, IMPORTS] = "ddp"
    """A file in trainkit/strategies (single, ddp, fsdp, ...), or package.module:function of your own."""


class MonitorConfig(Section):
    loggers: Annotated[tuple[str, ...], IMPORTS] = ("console", "jsonl", "tensorboard", "wandb")
    """Where records go, each once: files in trainkit/monitor, or package.module:function of your own."""
    log_every: PositiveInt = 10
    """Updates between two training records."""
    wandb_project: Annotated[str, SENDS] = "trainkit"
    hardware_every_seconds: PositiveFloat = 5.0
    """Seconds between two samples of GPU and CPU use."""

    profile_steps: tuple[NonNegativeInt, PositiveInt] | None = None
    """[20, 25]: profile the updates after the 20th up to the 25th, on rank 0, into RUN/profile; `touch RUN/PROFILE`
    profiles 5 at any time."""
    memory_history: bool = False
    """Note which line asks for which memory of the GPU, for the snapshot that is written when there is too little."""

    @field_validator("profile_steps")
    @classmethod
    def _forward(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("two steps, the second after the first, such as [20, 25]")
        return value

    @field_validator("loggers")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a list without repetitions: every record would be written twice")
        return value


class CollaborativeConfig(Section):
    sync: Literal["diloco", "gradients"] = "diloco"
    """How peers agree: diloco averages the progress of a round, in which each makes updates of its own; gradients
    averages gradients, and a round is one update of train.global_batch_size samples that all peers gather together."""
    round_seconds: PositiveFloat = 60.0
    """Length of a round; every peer trains as many updates as it can in it. gradients: the longest, after which the
    update is made with the samples that there are."""
    rounds: PositiveInt = 20
    """The run ends after so many rounds."""
    matchmaking_seconds: PositiveFloat = 3.0
    """How long before the end of a round peers look for one another."""
    outer_lr: PositiveFloat = 0.7
    """Of diloco's step; with gradients, optim and schedule say it all."""
    outer_momentum: Fraction = 0.9
    compression: Literal["none", "fp16", "8bit"] = "fp16"
    """What peers send: fp16 halves the traffic, 8bit halves it again. Who has a slow link takes 8bit by itself."""
    initial_peers: Annotated[tuple[str, ...], SENDS] = ()
    """Addresses of a swarm to join, by those who submit peers to it; whom it has invited set TRAINKIT_TOKEN."""
    port: Port = 0
    """Port of the first peer; 0: any free one."""
    open: Annotated[bool, SENDS] = False
    """Whoever has an address may join, as a volunteer. Else those whom `swarm invite` has given a token."""

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

    seed: Seed = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    strategy: StrategyConfig = StrategyConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    launch: LaunchConfig = LaunchConfig()
    collaborative: CollaborativeConfig = CollaborativeConfig()

    @model_validator(mode="after")
    def _goes_together(self) -> Config:
        check_combinations(self)
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


def reach(key: str, value: Any) -> Reach:
    """What a setting with that value can do; `PLAIN` for the default value, and for options of plugins of ours."""
    field = field_of(key)
    if field is None:
        section, _, option = key.partition(".")
        timm_unpickles = section == "model" and option.partition(".")[0] in ModelConfig.UNPICKLED
        # By this ending timm chooses a reader that unpickles nothing.
        safe = key == "model.pretrained_cfg_overlay.file" and str(value).endswith(".safetensors")
        return IMPORTS if timm_unpickles and value and not safe else PLAIN
    found = next((item for item in field.metadata if isinstance(item, Reach)), PLAIN)
    if found is IMPORTS:
        # A name with a colon: package.module:function, or a model of timm's from elsewhere (hf-hub:, local-dir:).
        names = value if isinstance(value, list | tuple) else [value]
        return IMPORTS if any(":" in str(name) for name in names) else PLAIN
    default = field.get_default()
    return PLAIN if value in (default, None, "") or (not value and not default) else found
