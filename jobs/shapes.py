"""Shapes of the answers to programs, for ``--json``; docs/reference/json.md is made from them.

Within a version keys are added, and neither change nor go. Times are seconds since 1970, durations seconds, memory MB,
shares percent; null is unknown.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from trainkit.cluster.site_profile import SiteFacts

Number = Annotated[int | float, WithJsonSchema({"type": "number"})]
Scalar = Annotated[bool | int | float | str | None, WithJsonSchema({"type": ["boolean", "number", "string", "null"]})]


def _or_null(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Replace what only another program or a person can have written into a file of a run or a site."""
    try:
        return validate(value)
    except ValidationError:
        return None


Value = Annotated[Scalar | list[Scalar] | dict[str, Scalar], WrapValidator(_or_null)]


class Part(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def plain(self) -> dict[str, Any]:
        """Return plain values."""
        return self.model_dump(mode="json")


class Answer(Part):
    """An answer to a program."""

    version: Literal[1] = 1
    """Version of these shapes."""


class ToldError(Part):
    """An error for users."""

    what: str
    why: str
    fix: str
    exit_code: int


class ErrorAnswer(Answer):
    """Printed in place of any other answer."""

    error: ToldError


class RunStatus(Answer):
    run: str
    folder: str
    state: str
    """In SLURM's words; NOT SUBMITTED, UNKNOWN."""
    alive: Literal["yes", "no", "unknown"]
    executor: str | None
    job_id: str | None
    living_jobs: list[str]
    nodes: str | None
    asked: float
    """When the scheduler gave this answer."""
    attempts: int
    finished: bool
    step: int | None
    total_steps: int | None
    epoch: float | None
    val: dict[str, Number | None] | None
    """Last validation: `step`, `epoch`, `loss` and the task's metrics, by name."""
    estimated_end: float | None
    made: float
    notes: list[str]
    """Problems."""
    tags: list[str]
    said: list[str]
    """Notes by users."""
    sorted_by: float | None


class OutlookRow(Part):
    nodes: int
    seconds: float
    """It needs so long, starts included."""
    hours: float
    """GPU-hours, or rank-hours without GPUs."""
    price: float | None
    parts: int
    """Jobs one after another, for the time limit."""
    basis: str
    """measured, or what its pace is taken from."""
    start: float | None
    """When the queue would start it; null: not known, or not asked, as it would be too late, too dear, or dearer than
    one that is sure enough."""
    done: float | None
    """After that start; the waits of later parts are not in it."""
    odds: float | None
    """Probability of being done by the deadline, in percent, from waits of similar jobs; null: not known."""
    jobs: int
    """The similar jobs."""
    refusal: str


class OutlookPart(Part):
    deadline: float | None
    budget: float | None
    nodes: int | None
    """The number of nodes to take; null: none is known to keep both."""
    says: str
    notes: list[str]
    unit: Literal["GPU-hours", "rank-hours"]
    currency: str | None
    rows: list[OutlookRow]


class SubmittedRun(Part):
    run: str
    folder: str
    executor: str | None
    job_id: str | None
    state: str
    goes_on: bool
    """It waits or runs; false: it had finished before."""


class Submitted(Answer):
    runs: list[SubmittedRun]
    outlook: OutlookPart | None = None
    """The answer to --by and --budget."""


class Decided(Part):
    name: str
    value: Scalar
    source: str
    """The flag, file, variable or default that has decided it."""
    reason: str


class DryRun(Answer):
    folder: str
    executor: str
    nodes: int
    ntasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int | None
    world_size: int
    time_limit_seconds: int
    decisions: list[Decided]
    directives: list[Decided]
    """sbatch's options."""
    settings: list[Decided]
    """Values as text, and what follows from them."""
    script: str | None
    """The batch script; null without a scheduler."""
    outlook: OutlookPart | None = None
    """The answer to --by and --budget."""


class PartitionStart(Part):
    partition: str
    start: str | None
    """Local time: 2026-11-21T22:04:10; null: it would be refused, or nobody tells."""
    nodes: str
    refusal: str


class Estimate(Answer):
    partitions: list[PartitionStart]
    """Soonest first."""


class FitResource(Part):
    name: Literal["time", "mem", "cpus", "gpus"]
    asked: float | None
    """time: seconds, mem: MB per node, cpus: per rank, gpus: per node; null: left to the site."""
    used: float
    where: str
    margin: float
    """Share of the use that is added."""
    samples: int
    next: float
    flag: str
    fits: bool


class FitPart(Part):
    resources: list[FitResource]
    flags: list[str]
    """To ask for next time; empty: what was asked for fits."""
    gpu_hours: float | None
    idle_gpu_hours: float | None
    price_per_gpu_hour: float | None
    currency: str | None


class FitAnswer(Answer):
    runs: list[str]
    """Folders of the runs that it is learned from."""
    fit: FitPart
    command: str


class Evidence(Part):
    where: str
    """`logs/0/rank-3.err:12`, below the run's folder, or a program: `squeue`."""
    file: str | None
    """The whole path, where it is a file."""
    line: int | None
    text: str


class Finding(Answer):
    runs: list[str]
    """Folders of the runs that it is about: the first is told of, the others have the same cause."""
    state: str
    job_id: str | None
    cause: str | None
    """Name in docs/reference/causes.md, or `exception`, `failed`, ...; null: nothing has failed."""
    what: str
    why: str
    evidence: list[Evidence]
    attempt: int | None
    rank: int | None
    """The rank that failed first."""
    node: str | None
    fix: str
    """Words before the command."""
    command: str | None
    """The command that mends it."""
    start: str | None
    """When the scheduler plans to start a job that waits."""


class LogLine(Answer):
    kind: Literal["line", "record", "event", "end"]
    """line: of a rank's log; record: of metrics.jsonl; event: of events.jsonl; end: the last one."""
    attempt: int | None = None
    rank: int | None = None
    stream: Literal["out", "err"] | None = None
    text: str | None = None
    values: dict[str, Value] | None = None
    """A record, whose metrics are the task's, or an event (docs/reference/events.md)."""
    state: str | None = None
    """At the end."""


class SiteAnswer(Answer):
    profile: str | None
    """Path of the profile; null: the site was asked."""
    settings: dict[str, Value]
    """Setting of docs/reference/settings.md -> its value."""
    site: SiteFacts | None
    """As below `site:` of a profile, memory in MB; null: nothing is known."""


class ReportedRun(Part):
    run: str
    folder: str
    point: dict[str, str]
    """Values of the settings that its sweep varied."""
    tags: list[str]
    finished: bool
    steps: int
    attempts: int
    metric: str
    """The task's headline."""
    best: float | None
    """On validation data."""
    best_step: int | None
    test: float | None
    train_seconds: float | None
    wall_seconds: float | None
    images_per_sec: float | None
    processor_hours: float | None
    """GPU-hours, or rank-hours on the CPU."""
    hours_by_use: dict[str, float]
    energy_kwh: dict[str, float]
    fit: FitPart | None
    """Resources given, used, and to ask for; null for a run that has not finished or asked nobody."""


class Reported(Answer):
    runs: list[ReportedRun]
    """A sweep's are listed best first."""
    files: list[str]
    left_out: list[str]
    """Why runs are left out."""


class CleanedRun(Part):
    run: str
    folder: str
    state: str
    takes_bytes: int
    frees_bytes: int
    goes: list[str]
    """Paths that go, or have gone."""
    stays: str
    """Why it stays; empty if it goes."""


class Cleaned(Answer):
    removed: bool
    frees_bytes: int
    runs: list[CleanedRun]
    trash: list[str]
    """Folders that hold what was removed, until it is deleted."""


class Checked(Part):
    what: str
    found: str
    remedy: str
    exit_code: int
    """0: well; 1: the swarm lacks it; 2: this machine does."""


class Doctor(Answer):
    can_join: bool
    """Without a token: can create a swarm."""
    findings: list[Checked]
