"""The configuration: a frozen tree of sections, one field for one setting.

Frozen means that a value printed at submission is the value used at step 10,000. Numbers that follow from others
(``grad_accum_steps``, the total number of steps) are functions of them and are not stored.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from trainkit.common.accelerators import SHARES
from trainkit.common.errors import UserError, unknown
from trainkit.config import plugins, yaml
from trainkit.config.slurm_options import time_minutes

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what torch, numpy and scikit-learn all take
Port = Annotated[int, Field(ge=0, le=65535)]


def only_if(holds: Callable[[Any], object], words: str) -> AfterValidator:
    """A value for which that holds, or null. ``words`` say what is wanted."""

    def check(value: Any) -> Any:
        if value is not None and not holds(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


# `time: 90` is the text 90. (true is refused before it comes here.)
_NUMBER_AS_TEXT = BeforeValidator(
    lambda value: str(value) if isinstance(value, int) else value, json_schema_input_type=str | int
)
_MEMORY = only_if(re.compile(r"\d+[KMGT]?B?").fullmatch, "a size as sbatch writes it: 32G, 500M, 0")
_TIME = only_if(time_minutes, "a time above zero")
_ENVIRONMENT = only_if(re.compile(r"(venv|conda|uv):.+").fullmatch, "venv:FOLDER, conda:NAME or uv:PROJECT")
_IMAGE = AfterValidator(lambda image: None if image in ("", "none") else image)  # against a profile's or a run's own
_NO_REPETITIONS = only_if(
    lambda names: len(set(names)) == len(names), "a list without repetitions: every record would be written twice"
)
_TWO_STEPS = only_if(lambda steps: steps[0] < steps[1], "two steps, the second after the first, such as [20, 25]")
_PLACE = only_if(
    re.compile(r"(s3|gs)://[a-z0-9][\w.-]+(/(?!\.\.?(/|$))[\w.=+-]+)*/?|file:///[^\x00-\x1f]*").fullmatch,
    "s3://bucket/prefix, gs://bucket/prefix or file:///folder",
)


@dataclass(frozen=True)
class Reach:
    """Effect of a setting's text beyond training, noted where the setting is defined: ``Annotated[str, SENDS]``.

    A setting that starts, sends or fetches something counts only from a file that is the user's own
    (`trainkit.run.ownership`).
    """

    does: Literal["imports", "starts", "sends", "fetches", "nothing"]


IMPORTS = Reach("imports")
"""It may name a function, ``package.module:function``."""
STARTS = Reach("starts")
"""It becomes a command, a flag of one, or the place that programs come from."""
SENDS = Reach("sends")
"""It says where weights, code, records or messages go, or lets somebody in."""
FETCHES = Reach("fetches")
"""It says which server is asked for data, by all that reads data."""
PLAIN = Reach("nothing")
"""A name, a size, a folder to read."""


class ImpossibleError(UserError):
    """Settings that are each well-formed and cannot hold together.

    ``keys``: those that one may change, by default all that ``what`` names; ``secret``: what was written must not be
    repeated.
    """

    def __init__(
        self, what: str, *, why: str, fix: str, keys: Sequence[str] = (), key: str | None = None, secret: bool = False
    ) -> None:
        self.keys = tuple(keys or re.findall(r"(?<![\w.=])[a-z]+\.\w+", what))
        self.secret = secret
        super().__init__(what, why=why, fix=fix, key=key or next(iter(self.keys), None))


class Section(BaseModel):
    """A section whose keys are exactly its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would take true for 1: `train.epochs=true` is a mistake.
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError
        return value


class PluginSection(Section):
    """A section that names a plugin; keys beyond its fields are that plugin's options."""

    model_config = ConfigDict(extra="allow")  # added to what `Section` says

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of the plugin, as written in the configuration."""
        return dict(self.model_extra or {})

    @classmethod
    def outlives(cls, key: str, name: str) -> bool:
        """True if a key goes on to count where another plugin, ``name``, is chosen."""
        return key in cls.model_fields

    @property
    def is_own(self) -> bool:
        """True if it names a function of the user's own, ``package.module:function``."""
        return ":" in self.name


class ExtensibleSection(PluginSection):
    """A section with plugins of ours, whose keys are its fields, beside those of libraries and of the user's own."""

    OURS: ClassVar[dict[str, tuple[str, ...]]]
    """Name -> fields that not all of them have."""

    @model_validator(mode="after")
    def _ours_have_no_further_keys(self) -> ExtensibleSection:
        if self.name in self.OURS:
            for key in self.options:
                raise PydanticCustomError("extra_forbidden", "no such key", {"key": key})
        return self


class TrainConfig(Section):
    epochs: PositiveInt = 20
    """Passes over the training data."""
    max_steps: PositiveInt | None = None
    """Optimizer updates; replaces `epochs` when given."""
    global_batch_size: PositiveInt = 64
    """Samples per optimizer update over all ranks. Keep it fixed when you change the number of GPUs."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Samples per rank per forward pass; null: the rank's whole share at once; auto: as many as fit into memory, found
    before the first update. Lower it when memory runs out."""
    memory_limit_mb: PositiveFloat | None = None
    """MiB that a rank may use, for micro_batch_size=auto; null: all free memory of its GPU, or on CPU its share of the
    memory of the job (SLURM's --mem) or of the machine."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "o2"] = "auto"
    """auto: the fastest format of the device; fp16: with loss scaling; o2: the model except BatchNorm in fp16, with
    fp32 weights for the optimizer and gradients of half the size."""
    channels_last: bool = False
    """Images as [N, H, W, C] in memory: faster convolutions on GPUs, and on CPUs with bf16."""
    activation_checkpointing: Literal["none", "full"] | PositiveInt = "none"
    """Recompute activations of blocks in the backward pass instead of storing them: less memory, a third more time.
    full: in all blocks; a number N: in every Nth."""
    compile: Literal["off", "model", "blocks"] = "off"
    """torch.compile of the whole model, or of each repeated block, which starts sooner. CPUs need a C++ compiler."""
    deterministic: bool = False
    """The same results from the same GPUs each time, at some cost; CPUs always give the same."""
    grad_clip_norm: PositiveFloat | None = None
    """Largest global norm of the gradients; null: no clipping."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to gradients that are infinite or not a number, which never reach the weights. stop: end the run after 3
    such updates in a row; skip: continue without them; rollback: after 3 in a row return to the newest checkpoint and
    continue with the data after them, at most 3 times."""
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """Loss of classification. bce: binary cross entropy of each class, averaged over classes (DeiT III, A2 of "ResNet
    strikes back"). Validation measures the same."""
    bce_threshold: Fraction | None = None
    """bce: a class with a larger share of a mixed image counts as present (0 in DeiT III, 0.2 in A2); null: classes
    count by their shares."""
    label_smoothing: Fraction = 0.0
    """The share of a label that is spread over all classes."""
    class_weights: Literal["balanced"] | tuple[PositiveFloat, ...] | None = None
    """Weight of a sample's loss, by its class: one number for each, or balanced: rare classes count as much as common
    ones. The loss is the weighted mean over the global batch. Classes are in the order of the model's outputs: as text
    (folder 10 before folder 2), or by number where the labels of a table or of shards are numbers."""
    distill_from: Annotated[str | None, PLAIN] = None
    """The run (folder or name) whose best model teaches this one, on the same images. It should be finished, or a
    resumed run may learn from other weights. null: learn from labels alone."""
    distill_alpha: Probability = 0.5
    """Share of the loss that compares with the teacher; the rest compares with the labels."""
    distill_temperature: PositiveFloat = 2.0
    """Divides the scores of both models before they are compared: a higher value gives small scores more weight."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay of an additional average of the weights (usually 0.999 to 0.9999; lower at first); both are validated, as
    `ema_loss` and so on. null: no average."""
    ema_warmup: bool = True
    """Start with a lower decay, so that a short run does not end near its initial weights; false: always ema_decay."""
    eval_every_epochs: PositiveInt = 1
    """Epochs between two validations; there is always one at the end."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after this many validations in a row without improvement, by `checkpoint.best`; null: train to the end. A
    schedule that lowers the rate towards the end (onecycle, cosine, linear, wsd) does not finish then: use constant,
    step or plateau."""
    early_stopping_min_delta: NonNegativeFloat = 0.0
    """Smallest improvement that counts, also for schedule.name=plateau, in the unit of the metric (accuracies:
    percent)."""

    @property
    def given_micro_batch_size(self) -> int | None:
        """`micro_batch_size`, if it is a number."""
        if isinstance(self.micro_batch_size, int):
            return self.micro_batch_size
        return None


_Epoch = Annotated[int, Field(ge=0, le=100_000)]


class AugmentConfig(Section):
    """Augmentation of whole batches on the device, after that of the data set itself (shift or crop, mirror)."""

    policy: Literal["none", "trivial_wide", "auto_imagenet", "auto_cifar10", "auto_svhn", "three"] = "none"
    """In place of RandAugment: trivial_wide (TrivialAugmentWide, one operation of any strength), auto_... (AutoAugment,
    pairs of operations that were learned on that data set), three (3-Augment of DeiT III: gray, solarized or blurred,
    and jitter of colours)."""
    rand_augment_ops: Annotated[int, Field(ge=0, le=10)] = 0
    """RandAugment: operations on an image, usually 2; 0: none."""
    rand_augment_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of each operation."""
    repeats: PositiveInt = 1
    """Repeated augmentation: how often each image occurs in an update, augmented differently each time, usually 3. The
    number of updates per epoch does not change, so an epoch sees a part of the images."""
    min_size: PositiveInt | None = None
    """Progressive resizing: the side of the images in the first epochs, in pixels; they then grow to the size of the
    data. Validation is at full size. null: one size."""
    ramp_epochs: tuple[_Epoch, _Epoch] | None = None
    """The epoch up to which training images have min_size, and the epoch from which they have full size."""
    size_increment: PositiveInt = 32
    """Sizes in between are multiples of this many pixels: 32 suits networks that halve an image five times."""
    random_erasing_prob: Probability = 0.0
    """Probability that an image loses a random rectangle."""
    random_erasing_mode: Literal["const", "rand", "pixel"] = "const"
    """Filling of the rectangle: the mean colour, a random colour, or noise."""
    mixup_alpha: NonNegativeFloat = 0.0
    """Mixup: parameter of the Beta distribution from which the share of an image is drawn, usually 0.2 to 1; 0:
    none."""
    cutmix_alpha: NonNegativeFloat = 0.0
    """CutMix: the same, usually 1. With mixup, each pair of images gets one of the two."""
    mixup_prob: Probability = 1.0
    """Probability that a pair is mixed by either."""
    mixup_switch_prob: Probability = 0.5
    """Probability of CutMix instead of mixup if both are on."""

    def size_at(self, epoch: int, full: int) -> int:
        """Side of the training images of an epoch, counted from 0, in pixels; ``full``: that of the data's.

        It grows linearly in steps, as ``min_res``, ``start_ramp`` and ``end_ramp`` of ffcv-imagenet (train_imagenet.py)
        and ``size_increment`` of ProgressiveResizing in MosaicML's Composer have it.
        """
        if self.min_size is None or self.ramp_epochs is None or epoch >= self.ramp_epochs[1]:
            return full
        start, end = self.ramp_epochs
        if epoch <= start:
            return self.min_size
        side = self.min_size + (full - self.min_size) * (epoch - start) / (end - start)
        return max(self.min_size, min(round(side / self.size_increment) * self.size_increment, full))

    def sizes(self, full: int) -> list[int]:
        """All sides of training images, from the smallest on."""
        _, end = self.ramp_epochs or (0, 0)
        return sorted({self.size_at(epoch, full) for epoch in range(end + 1)})

    @property
    def mixes(self) -> bool:
        """True if images are mixed, in pairs."""
        return (self.mixup_alpha > 0 or self.cutmix_alpha > 0) and self.mixup_prob > 0


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = None
    """Updates between two checkpoints; null: no limit by updates."""
    every_epochs: PositiveInt | None = 1
    """Epochs between two checkpoints; null: no limit by epochs."""
    every_minutes: PositiveFloat | None = 15.0
    """Save when this many minutes have passed since the last checkpoint: what a power cut may cost at most."""
    keep: PositiveInt | None = None
    """Number of checkpoints to keep besides the best; null: 3 while it trains, of a finished run only the newest."""
    asynchronous: bool = True
    """Continue training while a checkpoint is written, from a copy of each rank's share in memory."""
    best: Annotated[Annotated[str, Field(pattern=r"^val/\w+$")] | None, PLAIN] = None
    """The metric that selects `best`: val/loss, or val/ and a metric of the task; val/ema_...: that of the averaged
    weights (train.ema_decay). null: the headline of the task."""
    remote: Annotated[str | None, SENDS, _PLACE] = None
    """Upload `best` and `latest` there in the background, below the run's name: s3://bucket/prefix,
    gs://bucket/prefix or file:///folder. Credentials come from the environment only."""

    @field_validator("remote", mode="before")  # before `_PLACE`, whose message would repeat the secret
    @classmethod
    def _place_without_secrets(cls, value: Any) -> Any:
        if isinstance(value, str) and set(value) & set("@?#"):
            why = "Configurations are stored, so they must not contain keys or passwords."
            fix = "Use s3://bucket/prefix, and put credentials into the environment."
            raise ImpossibleError("checkpoint.remote contains more than an address.", why=why, fix=fix, secret=True)
        return value


class LaunchConfig(Section):
    """Resources. The names are those of sbatch's flags, with underscores."""

    executor: Annotated[str, IMPORTS] = "auto"
    """The scheduler that starts the job. auto: slurm where sbatch is found, else local. debug: in the calling process;
    package.module:build: one of your own."""
    cluster: Annotated[str | None, STARTS] = None
    """A site profile: a name in configs/clusters or the path of a YAML file."""
    nodes: PositiveInt = 1
    """Number of nodes."""
    spare_nodes: NonNegativeInt = 0
    """Further nodes of a SLURM job, without ranks: one that is lost is replaced in the same job, without a wait in the
    queue."""
    gpus_per_node: NonNegativeInt | Literal["auto"] = "auto"
    """auto: what this machine or the partition has; 0: train on CPU."""
    gpu_dialect: Literal["gpus-per-node", "gres", "constraint"] = "gpus-per-node"
    """Option with which GPUs are requested at the site: --gpus-per-node, --gres=gpu:N, or by its --constraint alone."""
    gpu_type: Annotated[str | None, PLAIN] = None
    """Type of the GPUs, as the site calls it: a100. null: any."""
    ntasks_per_node: PositiveInt | None = None
    """Ranks per node; null: one per GPU, or one on CPU."""
    cpus_per_task: PositiveInt | None = None
    """CPUs for each rank; null: the share that matches the job's GPUs."""
    mem: Annotated[Annotated[str, _NUMBER_AS_TEXT, _MEMORY] | None, PLAIN] = None
    """Memory per node, as sbatch writes it: 32G, 500M; 0 for all."""
    time: Annotated[str, PLAIN, _NUMBER_AS_TEXT, _TIME] = "1:00:00"
    """Time limit, as sbatch writes it: minutes, H:MM:SS, D-HH:MM:SS."""
    partition: Annotated[str | None, PLAIN] = None
    """Partition of the cluster, or several: a,b. null: the site's default."""
    account: Annotated[str | None, PLAIN] = None
    """Account to charge."""
    qos: Annotated[str | None, PLAIN] = None
    """Quality of service."""
    constraint: Annotated[str | None, PLAIN] = None
    """Features that the nodes must have."""
    nodelist: Annotated[str | None, PLAIN] = None
    """Run on these nodes: n[1-2]."""
    exclude: Annotated[str | None, PLAIN] = None
    """Do not run on these nodes."""
    reservation: Annotated[str | None, PLAIN] = None
    """Run in this reservation."""
    gres: Annotated[str | None, PLAIN] = None
    """Generic resources, for sites that do not know --gpus-per-node: gpu:4, gpu:a100:4."""
    job_name: Annotated[str | None, PLAIN] = None
    """null: the preset's name."""
    dependency: Annotated[str | None, PLAIN] = None
    """Start after another job or run: afterok:JOBID, afterok:RUN."""
    interface: Annotated[str | None, PLAIN] = None
    """Network interface for the traffic between nodes, such as ib0; null: that of the route to the head node. The
    backends' own variables, such as GLOO_SOCKET_IFNAME, take precedence."""
    runs_per_gpu: PositiveInt = 1
    """Runs of a sweep that share a GPU, with one rank each. On SLURM each requests its share of a divided GPU, of CPUs
    and of memory. On this machine they train side by side, also on its CPU."""
    max_parallel: PositiveInt | None = None
    """Runs of a sweep that may run at the same time; null: as many as fit."""
    notify: tuple[Literal["finished", "failed"], ...] = ("finished", "failed")
    """Events that are sent to your addresses (TRAINKIT_NOTIFY, or ~/.local/state/trainkit/notify). failed: also when a
    run is not restarted, or was stopped and does not continue by itself."""
    mail_user: Annotated[str | None, SENDS] = None
    """Address that SLURM sends mail to."""
    mail_type: Annotated[str | None, PLAIN] = None
    """Events for which SLURM sends mail: BEGIN,END,FAIL."""
    requeue: bool | Literal["chain", "always", "expedite"] = True
    """Requeue after a time limit, a preemption or a failure that a restart may cure, and continue from the newest
    checkpoint. chain: by a further job each time, for sites that forbid requeueing. always: also a script that has not
    ended by itself when it was told to stop. expedite: before all other jobs after a lost node, where SLURM has that
    (25.11)."""
    restart_in_place: bool = True
    """After such a failure start the ranks again in the same job, without a wait in the queue, by processes that have
    loaded torch and wait; not where requeue is false, nor for peers of a swarm."""
    on_restart: Annotated[str | None, STARTS] = None
    """Words that a script gets from its second start on: "--resume {run}/last.pt". Left out while a path in them that
    is below the run's folder is not there."""
    stop_signal: Literal["USR2", "USR1", "TERM", "INT"] = "USR2"
    """The signal that tells a script to save and end."""
    stop_exit_code: Annotated[int, Field(ge=1, le=255)] | None = None
    """Exit code of a script that was told to stop, has saved, and is to be started again; 0 then says that it is done.
    null: 0 says that it has saved."""
    preflight: bool = False
    """Check the nodes in the job before the ranks start; a bad node is named and excluded, and the job is queued
    again."""
    hang_seconds: PositiveInt = 600
    """Seconds without progress after which a rank counts as hanging: the attempt ends, and the slowest rank is named.
    While all ranks compute an update it is 20 times their slowest recent one, at least 60 s, if that is less. A script
    that writes no records never hangs by the default."""
    idle_minutes: PositiveFloat | None = None
    """Minutes of training in which a GPU does nothing (0 %) after which the run saves and ends, before the site ends it
    or counts the hours; `resume` goes on. null: no limit."""
    signal_seconds: PositiveInt | None = None
    """Seconds before the time limit at which the job is told to save; null: 90, or a third of a short limit."""
    internet: bool = True
    """Compute nodes reach the internet; false keeps W&B and model hubs offline there."""
    carbon_intensity: Annotated[PositiveFloat | str | None, PLAIN] = None
    """g of CO2 equivalent per kWh of the site's electricity, or its country, such as DE, for a known yearly mean. null:
    the report gives only energy."""
    gpu_hour_price: Annotated[Annotated[str, Field(pattern=r"^\d+(\.\d+)?( ?\w{1,12})?$")] | None, PLAIN] = None
    """Price of a GPU for an hour at the site: 0.45 EUR. What idle GPUs have cost is then said in it."""
    setup: Annotated[tuple[str, ...], STARTS] = ()
    """Shell lines before the job starts: module load, source ..."""
    modules: Annotated[tuple[str, ...], STARTS] = ()
    """Environment modules that a batch job loads first: [cuda/12.4]."""
    environment: Annotated[str | None, STARTS, _ENVIRONMENT] = None
    """The Python of a batch job. null: the one that submits; venv:FOLDER, conda:NAME, uv:PROJECT."""
    container_image: Annotated[str | None, STARTS, _IMAGE] = None
    """Run the ranks in a container: image.sif, image.sqsh, nvcr.io#nvidia/pytorch:25.01-py3, docker://..."""
    container_runtime: Literal["auto", "pyxis", "apptainer", "docker"] = "auto"
    """auto: apptainer for .sif files and URLs; otherwise pyxis on SLURM, docker without it (jobs.launch)."""
    container_mounts: Annotated[tuple[str, ...], STARTS] = ()
    """Further folders to mount in the container, SOURCE:TARGET[:ro]; those of run, submission and data are always
    mounted."""
    container_python: Annotated[str, STARTS] = "python3"
    """The interpreter in the container, with torch and the other packages that trainkit needs."""
    sbatch: Annotated[dict[str, str], STARTS] = {}
    """Further sbatch options without their dashes: {comment: thesis}."""
    srun: Annotated[dict[str, str], STARTS] = {}
    """Further srun options without their dashes."""

    @property
    def has_own_environment(self) -> bool:
        """True if the job brings an environment: what is missing here may be there."""
        return bool(self.environment or self.container_image or self.modules or self.setup)

    def lead_seconds(self) -> int:
        """Seconds before the time limit at which the job is told to save."""
        return self.signal_seconds or max(5, min(90, int(time_minutes(self.time) * 60 / 3)))

    @field_validator("executor")
    @classmethod
    def _is_a_scheduler(cls, value: str) -> str:
        known = ["auto", *plugins.available("trainkit.cluster"), "debug"]
        if value not in known and ":" not in value:
            error = unknown("executor", value, known, own=True)
            raise ImpossibleError(error.what, why=error.why, fix=error.fix, keys=["launch.executor"])
        return value

    @field_validator("carbon_intensity", mode="before", json_schema_input_type=PositiveFloat | str | None)
    @classmethod
    def _is_a_country(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if re.fullmatch(r"\d+(\.\d*)?", value, re.ASCII):  # an override, which may be text
            return float(value)
        countries = yaml.packaged("carbon")["countries"]
        if value not in countries:
            what = f"launch.carbon_intensity={value} is not a country with a known mean."
            why = f"Known countries: {', '.join(sorted(countries))}."
            fix = "Give a number: g of CO2 equivalent per kWh."
            raise ImpossibleError(what, why=why, fix=fix)
        return value

    @field_validator("sbatch", "srun", mode="before", json_schema_input_type=dict[str, str | float | bool | None])
    @classmethod
    def _options(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if not all(re.fullmatch(r"[A-Za-z][\w-]+", str(key)) for key in value):
            raise ValueError("options by their long names, without dashes, as in {comment: thesis}")
        options = {}
        for key, item in value.items():
            if item is not False:  # {exclusive: true} is the bare --exclusive; {exclusive: false} is none
                options[str(key).replace("_", "-")] = "" if item is None or item is True else str(item)
        return options

    @field_validator("*", mode="before")
    @classmethod
    def _on_one_line(cls, value: Any) -> Any:
        # All of it goes into the batch script: a line break would begin a line of its own there.
        # pydantic calls the last one of such validators first.
        if not all(map(is_one_line, _texts(value))):
            raise ValueError("text on one line, without control characters")
        return value

    @model_validator(mode="after")
    def _combinations(self) -> LaunchConfig:
        asks = self.gres is not None and re.search("|".join(("gpu", *SHARES)), self.gres)
        if asks and isinstance(self.gpus_per_node, int):
            what = "launch.gres and launch.gpus_per_node both request GPUs."
            raise ImpossibleError(what, why="A site supports one of them.", fix="Give one of them.")
        asks_more = asks or self.gpu_type or self.gpus_per_node not in ("auto", 0, 1) or self.nodes > 1
        if self.spare_nodes and (self.runs_per_gpu > 1 or not self.requeue):
            other = f"launch.requeue={str(self.requeue).lower()}" if not self.requeue else "launch.runs_per_gpu"
            what = f"launch.spare_nodes={self.spare_nodes} does not go with {other}."
            why = "A spare node replaces one that was lost, for another start of the ranks."
            keys = ("launch.spare_nodes", other.partition("=")[0])
            raise ImpossibleError(what, why=why, fix="Remove one of them.", keys=keys)
        if self.runs_per_gpu > 1 and asks_more:
            what = "launch.runs_per_gpu does not go with other requests for GPUs."
            fix = "Remove the other requests, or launch.runs_per_gpu."
            raise ImpossibleError(what, why="Each run is one rank, and requests its share of a GPU.", fix=fix)
        memory = [name for name in ("mem-per-cpu", "mem-per-gpu", "mem") if name in self.sbatch]
        if self.mem is not None and "mem" not in memory:
            memory.append("mem")
        if len(memory) > 1:
            what = f"--{' and --'.join(memory)} both request memory."
            fix = "Give one of them; unset the variable SBATCH_MEM_PER_... if it is the source."
            raise ImpossibleError(what, keys=("launch.sbatch", "launch.mem"), why="sbatch takes one of them.", fix=fix)
        seconds = time_minutes(self.time) * 60
        if self.signal_seconds is not None and self.signal_seconds * 2 > seconds:
            what = f"launch.signal_seconds={self.signal_seconds} is more than half of launch.time={self.time}."
            fix = f"Use launch.signal_seconds={max(1, int(seconds / 3))}, or request more time."
            raise ImpossibleError(what, why="The job would be told to save soon after its start.", fix=fix)
        return self


def is_one_line(text: str) -> bool:
    """True if it has no line break and no other control character, but for tabs."""
    return all(char == "\t" or unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp") for char in text)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value as YAML gives it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


class ModelConfig(PluginSection):
    # Options of timm's that name weights which it may unpickle.
    UNPICKLED: ClassVar[tuple[str, ...]] = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay")

    name: Annotated[str, IMPORTS] = "fashion_cnn"
    """fashion_cnn, any timm or torchvision name, or package.module:function of your own."""
    checkpoint: Annotated[str | None, PLAIN] = None
    """A file of weights to start from (.safetensors, .pth, .pt): fine-tuning. A head for a different number of classes
    is initialised anew."""
    freeze: Annotated[tuple[str, ...], PLAIN] = ()
    """Parameters that are not trained, by name: ["patch_embed.*", "blocks.[0-5].*"]; norms in them keep their
    statistics."""


class DataConfig(PluginSection):
    # Options of data sets that name a server which training and evaluation ask.
    FETCHED: ClassVar[tuple[str, ...]] = ("url",)

    name: Annotated[str, IMPORTS] = "digits"
    """A data set: a file in trainkit/data (`python -m jobs.prepare --help` lists them), or package.module:function."""
    root: Annotated[str, PLAIN] = "data"
    """Folder of the data sets, relative to the current folder."""
    workers: NonNegativeInt | Literal["auto"] = "auto"
    """DataLoader processes per rank. auto: the CPUs of the rank, none for data that fits in memory."""
    device: Literal["auto", "cpu"] = "auto"
    """Device for data that fits in memory. auto: the GPU, if the data needs less than a tenth of its free memory."""
    pack: PositiveInt | None = None
    """Shorter side of the images of a pack to read from; `python -m jobs.prepare DATASET --pack 256` makes it."""
    stage: bool | Literal["auto"] = False
    """Copy the pack to this node's own disk first ($SLURM_TMPDIR, $TMPDIR), once per node. auto: if there is enough
    space."""
    max_broken: NonNegativeInt = 0
    """Number of undecodable images to replace before the run fails; evaluation leaves them out of its counts."""
    all_kinds: bool = False
    """Folders: read every known kind of image, by content if the ending says nothing, and every name of a split. New
    runs set it. An older run continues without it, with the files that it began with: ten endings, and the names train,
    val and test."""
    fake: bool = False
    """Use made-up images of the same shape, to rehearse a run whose data is elsewhere. Its reports say so."""

    @property
    def title(self) -> str:
        """The data's name, for those who report of it."""
        return f"made-up images in place of {self.name}" if self.fake else self.name

    @model_validator(mode="after")
    def _only_packs_are_staged(self) -> DataConfig:
        if self.stage is not False and self.pack is None:
            why = "Only packs are copied to a node's own disk: one large file instead of a million small ones."
            fix = "Make one with `python -m jobs.prepare DATASET --pack 256`, and set data.pack=256."
            raise ImpossibleError(f"data.stage={str(self.stage).lower()} without data.pack.", why=why, fix=fix)
        return self


class OptimConfig(ExtensibleSection):
    SHARED: ClassVar[tuple[str, ...]] = ("momentum", "nesterov", "betas")
    OURS: ClassVar[dict[str, tuple[str, ...]]] = {
        "adamw": ("betas",), "sgd": ("momentum", "nesterov"), "lamb": ("betas",), "muon": SHARED,
        "airbench": (),
    }  # fmt: skip

    name: Annotated[str, IMPORTS] = "adamw"
    """adamw, sgd, lamb (for very large batches), muon (for matrices and filters, AdamW for the rest) or airbench (for
    the model of that name); any other of timm or torch, such as adan, lion, rmsprop (timm/NAME or torch/NAME if both
    have it); or your own package.module:function. Its options are further keys."""
    lr: PositiveFloat = 2.0e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.05
    """Applied to matrices and filters only, not to biases and norms."""
    layer_decay: Share = 1.0
    """Layers nearer to the input learn more slowly, each at this fraction of the next layer's rate. 0.65 to 0.8 is
    usual for fine-tuning vision transformers; 1: all alike."""
    betas: tuple[Fraction, Fraction] | tuple[Fraction, Fraction, Fraction] | None = (0.9, 0.999)
    """Decay of the running moments, for all but SGD. The default is that of ours; null: the optimizer's own, the
    default of all others."""
    momentum: Fraction | None = 0.9
    """SGD and Muon, whose default is 0.95. The default is that of ours; null: as in betas."""
    nesterov: bool | None = False
    """SGD and Muon, whose default is true. The default is that of ours; null: as in betas."""
    muon_as: Literal["author", "timm"] = "author"
    """author: Jordan's Muon, torch.optim.Muon's for matrices and filters, and AdamW for the last layer and everything
    else; timm: with timm's coefficients, the last layer as well, and with nesterov NAdamW for the rest."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_are_those_of_ours(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "name" not in values:
            return values
        if values["name"] == "muon":
            return {"momentum": 0.95, "nesterov": True, **values}
        if values["name"] in cls.OURS:
            return values
        return {**dict.fromkeys(cls.SHARED), **values}

    @classmethod
    def outlives(cls, key: str, name: str) -> bool:
        return super().outlives(key, name) and (name in cls.OURS or key not in cls.SHARED)

    def given(self) -> dict[str, Any]:
        """Return the optimizer's named arguments, beyond its parameters, their decay and the rate."""
        shared = self.OURS.get(self.name, self.SHARED)
        return self.model_dump(include=set(shared), exclude_none=True) | self.options


class ScheduleConfig(ExtensibleSection):
    OURS: ClassVar[dict[str, tuple[str, ...]]] = dict.fromkeys(
        ("onecycle", "cosine", "linear", "constant", "step", "wsd", "plateau"), ()
    )

    name: Annotated[str, IMPORTS] = "onecycle"
    """onecycle, cosine, linear, constant, step, wsd (warm up, stay, decay at the end), plateau (falls when validation
    no longer improves, by `checkpoint.best`), or package.module:function of your own: function(step, total_steps, lr)
    -> the rate of that update. Its keyword-only parameters are further keys; those called as a key below, or
    steps_per_epoch, are given to it."""
    warmup_epochs: NonNegativeFloat = 1.0
    """Epochs from a small rate up to optim.lr, counted per update; at most half of the run."""
    final_lr_ratio: Fraction = 0.0
    """The lowest rate, as a fraction of optim.lr: onecycle with the last update; cosine, linear and wsd would
    with the one after; plateau: the lowest rate."""
    step_epochs: PositiveFloat = 30.0
    """Epochs between two falls (step only)."""
    gamma: Fraction = 0.1
    """Factor of the rate at each fall (step and plateau)."""
    patience: NonNegativeInt = 10
    """Validations in a row without improvement before the rate falls (plateau only)."""
    decay_ratio: Share = 0.2
    """Share of the run in which the rate falls (wsd only); at most what the warm-up leaves."""
    start_step: NonNegativeInt = 0
    """The update at which the schedule starts again; `resume RUN train.epochs=N --restart-schedule` sets it."""


class TaskConfig(PluginSection):
    name: Annotated[str, IMPORTS] = "classification"
    """A file in trainkit/training/tasks (classification, multilabel), or package.module:function of your own."""


class StrategyConfig(PluginSection):
    name: Annotated[str, IMPORTS] = "ddp"
    """A file in trainkit/distributed/strategies (single, ddp, fsdp, ...), or package.module:function of your own."""


class MonitorConfig(Section):
    loggers: Annotated[tuple[str, ...], IMPORTS, _NO_REPETITIONS] = ("console", "jsonl", "tensorboard", "wandb")
    """Loggers that get the records, each once: files in trainkit/monitor, or package.module:function of your own."""
    log_every: PositiveInt = 10
    """Updates between two training records."""
    wandb_project: Annotated[str, SENDS] = "trainkit"
    """Project of Weights & Biases and of trackio, experiment of MLflow."""
    hardware_every_seconds: PositiveFloat = 5.0
    """Seconds between two samples of GPU and CPU use."""

    profile_steps: Annotated[tuple[NonNegativeInt, PositiveInt] | None, _TWO_STEPS] = None
    """[20, 25]: profile the updates after the 20th up to the 25th, on rank 0, into RUN/profile; `touch RUN/PROFILE`
    profiles 5 at any time."""
    memory_history: bool = False
    """Record which line allocates which GPU memory, for the snapshot that is written when memory runs out."""


class CollaborativeConfig(Section):
    sync: Literal["diloco", "gradients"] = "diloco"
    """Agreement of the peers. diloco: each trains alone for a round, then all take one step along the average of their
    progress (arXiv 2311.08105). gradients: runs of version 0.1, which can be read but not trained."""
    round_seconds: PositiveFloat = 60.0
    """Length of a round, in which each peer makes as many updates as it can."""
    rounds: PositiveInt = 20
    """Rounds after which the run ends."""
    matchmaking_seconds: PositiveFloat = 3.0
    """Seconds before the end of a round at which peers look for one another."""
    outer_lr: PositiveFloat = 0.7
    """Learning rate of the common step after a round."""
    outer_momentum: Fraction = 0.9
    """Nesterov momentum of that step."""
    compression: Literal["none", "fp16", "8bit", "4bit"] = "fp16"
    """Compression of what peers send: fp16 halves the traffic, 8bit halves it again; 4bit halves the upload once more,
    and averages return in 8 bit. A peer with a slow link uses a coarser format by itself."""
    initial_peers: Annotated[tuple[str, ...], SENDS] = ()
    """Addresses of a swarm that submitted peers join; invited peers set TRAINKIT_TOKEN."""
    port: Port = 0
    """Port of the first peer; 0: any free one."""
    open: bool = False
    """Strangers may join: only in runs of version 0.1, which can be read but not trained."""

    @model_validator(mode="after")
    def _possible(self) -> CollaborativeConfig:
        if self.round_seconds < self.matchmaking_seconds + 1:
            what = f"collaborative.round_seconds={self.round_seconds:g} leaves no time to train before "
            what += f"collaborative.matchmaking_seconds={self.matchmaking_seconds:g}."
            fix = f"Use collaborative.round_seconds={self.matchmaking_seconds + 1:g} or more."
            raise ImpossibleError(what, why="Peers look for one another at the end of each round.", fix=fix)
        return self


class ScriptConfig(Section):
    """A program of the user's own that each rank starts, in place of our training: a file, a module, or any other."""

    path: Annotated[str | None, STARTS] = None
    """A Python file."""
    module: Annotated[str | None, STARTS] = None
    """A module, as `python -m` takes it."""
    program: Annotated[str | None, STARTS] = None
    """Any other program: torchrun, accelerate, a shell script."""
    arguments: Annotated[tuple[str, ...], STARTS] = ()
    """Its words. {run}, {node_rank}, {num_nodes}, {gpus_per_node}, {master_addr}, {master_port} and names of `values`
    are filled in; {{run}} is the text {run}."""
    values: Annotated[dict[str, str], STARTS] = {}
    """Placeholders of your own, and what they stand for: what a sweep varies."""
    root: Annotated[str | None, STARTS] = None
    """Folder of the project, whose code each run keeps a copy of; null: the current one, or that of the script."""

    @property
    def name(self) -> str:
        """Name of the program, for people and for the run."""
        if self.module is not None:
            return self.module
        return Path(self.path or self.program or "").name

    @field_validator("values", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): str(item) for key, item in value.items()}
        return value

    @model_validator(mode="after")
    def _one_program(self) -> ScriptConfig:
        given = [name for name in ("path", "module", "program") if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"A script is one program: {' and '.join(f'script.{name}' for name in given) or 'none is given'}."
            fix = "Give one of script.path, script.module and script.program."
            raise ImpossibleError(what, why="Each rank starts one.", fix=fix, keys=[f"script.{name}" for name in given])
        return self


class Config(Section):
    """A whole run."""

    seed: Seed = 0
    """Seed of weights, data order and augmentation."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    task: TaskConfig = TaskConfig()
    train: TrainConfig = TrainConfig()
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    strategy: StrategyConfig = StrategyConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    launch: LaunchConfig = LaunchConfig()
    collaborative: CollaborativeConfig = CollaborativeConfig()
    script: ScriptConfig | None = None
    """A training script of your own in place of all but `launch` and `monitor`, see docs/script.md."""

    def plugin_names(self) -> tuple[str, ...]:
        """The names in its sections, of which ``package.module:function`` is code of the user's own."""
        plugins = (self.model, self.data, self.task, self.optim, self.schedule, self.strategy)
        return (*(section.name for section in plugins), self.launch.executor)


def _sections() -> dict[str, type[BaseModel]]:
    found = dict[str, type[BaseModel]]()
    for name, field in Config.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found


SECTIONS = _sections()


def field_of(key: str) -> FieldInfo | None:
    """The declaration of a dotted key; None for options of plugins and for keys that do not exist."""
    section, _, name = key.rpartition(".")
    if not section:
        return Config.model_fields.get(name)
    return SECTIONS[section].model_fields.get(name) if section in SECTIONS else None


def reach(key: str, value: Any) -> Reach:
    """Return the reach of a setting with that value; `PLAIN` for the default, and for options of plugins of ours."""
    field = field_of(key)
    if field is None:
        section, _, option = key.partition(".")
        timm_unpickles = section == "model" and option.partition(".")[0] in ModelConfig.UNPICKLED
        # By this ending timm chooses a reader that unpickles nothing.
        safe = key == "model.pretrained_cfg_overlay.file" and str(value).endswith(".safetensors")
        if section == "data" and option in DataConfig.FETCHED and "://" in str(value):
            return FETCHES
        return IMPORTS if timm_unpickles and value and not safe else PLAIN
    if IMPORTS in field.metadata:
        # A name with a colon: package.module:function, or a model of timm's from elsewhere (hf-hub:, local-dir:).
        return IMPORTS if ":" in str(value) else PLAIN
    default = field.get_default()
    if value in (default, None, "") or (not value and not default):
        return PLAIN
    return next((item for item in field.metadata if isinstance(item, Reach)), PLAIN)
