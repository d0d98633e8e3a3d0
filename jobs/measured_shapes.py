"""Shapes of the answers to programs that hold measurements: of nodes, benches, models and swarms."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from pydantic import ConfigDict, ValidationError

from jobs.shapes import Answer, Part
from trainkit.common import fileio
from trainkit.run.contributions import Contribution
from trainkit.run.folder import BenchDir


class CheckedDisk(Part):
    path: str
    free_mb: int | None = None
    free_inodes: int | None = None
    error: str | None = None


class CheckedGpu(Part):
    """A GPU; null is what its driver does not tell, and devices of plugins tell little."""

    model_config = ConfigDict(extra="ignore")

    index: int
    name: str | None = None
    driver: str | None = None
    memory_used_mb: int | None = None
    memory_total_mb: int | None = None
    temperature_c: int | None = None
    ecc_errors: int | None = None
    """Uncorrected ones."""
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    processes: list[int] | None = None
    """Of others."""
    error: str | None = None


class CheckedRank(Part):
    node: str
    node_rank: int
    local_rank: int
    host: str | None = None
    """This and all below: of the first rank of a node."""
    versions: dict[str, str] | None = None
    cpus: int | None = None
    memory_free_mb: int | None = None
    memory_total_mb: int | None = None
    disks: list[CheckedDisk] | None = None
    gpus: list[CheckedGpu] | None = None


class CheckedSpeed(Part):
    gb_s: float | None = None
    """Of an all-reduce."""
    error: str | None = None


class CheckedPair(CheckedSpeed):
    ranks: list[int]


class CheckedProducts(Part):
    device: str
    checksum: float
    """Of matrix products, alike on all ranks."""
    wrong: int
    unsteady: bool
    inside: CheckedSpeed | None = None
    """Among the ranks of the node."""


class NodeProblem(Part):
    node: str
    check: str
    what: str
    bad: bool
    """Nothing should run there; false: a remark."""


class NodeCheck(Answer):
    bad: list[str]
    """Nodes that nothing should run on."""
    findings: list[NodeProblem]
    time: float
    ranks: dict[str, CheckedRank]
    missing: dict[str, str]
    """Rank that did not answer -> its node."""
    found: dict[str, CheckedProducts]
    """By rank."""
    clocks: dict[str, float] | None = None
    """First rank of a node -> its clock minus that of rank 0."""
    pairs: list[CheckedPair] | None = None


class BenchControl(Part):
    ratios: list[float]
    """Of the first arm to itself, by round."""
    median: float | None
    noise: list[float | None]
    """The lowest and highest ratio that mean nothing."""


class BenchArm(Part):
    """An arm; other keys are medians of what else its bench measures."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]

    name: str
    overrides: list[str]
    outcome: Literal["", "passed", "refused", "failed"]
    """Of a proof."""
    figure: str
    failed: str
    """Why it was not measured to the end; empty if it was."""
    rate: float | None
    """In the bench's unit."""
    rate_min: float | None
    rate_max: float | None
    ratio: float | None
    ratios: list[float]
    why_no_ratio: str
    memory_mb: float | None
    memory_ratio: float | None
    loss: float | None
    largest_micro_batch: int | None


class BenchLeftOut(Part):
    name: str
    why: str


class BenchSample(Part):
    """One turn of an arm, of all its ranks together."""

    model_config = ConfigDict(extra="ignore")

    arm: str
    round: int
    time: float | None = None
    seconds: float
    updates: int | None = None
    images: int | None = None
    bytes: float | None = None
    memory_mb: list[float] | None = None
    """Peak of each rank."""
    loss: float | None = None
    params: int | None = None
    skipped: int | None = None
    cpu_taken: float | None = None
    parts: dict[str, float] | None = None
    """Use of the time -> seconds."""
    extra: dict[str, float | None] | None = None


class Benched(Answer):
    bench: str
    question: str
    preset: str
    unit: str
    meaning: str
    where: str
    ended: bool
    rounds: int
    updates: int
    notes: list[str]
    control: BenchControl
    arms: list[BenchArm]
    left_out: list[BenchLeftOut]
    samples: list[BenchSample]

    @classmethod
    def of(cls, run: BenchDir) -> Benched:
        """Return the results of a bench, but for samples that are not whole."""
        told = fileio.read_object(run.results)
        samples = []
        for sample in told["samples"]:
            with suppress(ValidationError):
                samples.append(BenchSample.model_validate(sample))
        return cls.model_validate(told | {"samples": samples})


class ClassScore(Part):
    name: str
    precision: float
    recall: float
    f1: float
    images: int


class Evaluated(Answer):
    """Metrics; other keys are `loss`, `samples` and the task's own, and of averaged weights `ema_loss` and so on."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]

    run: str
    split: str
    step: int
    classes: list[str]
    made_up: bool = False
    """The images are made up, so that the metrics mean nothing."""
    ece: dict[str, float | None]
    """raw, ema -> calibration error."""
    confusion: dict[str, list[list[int]]]
    """raw, ema -> [class, taken for, images], by position in `classes`."""
    per_class: dict[str, list[ClassScore]]
    """raw, ema -> scores of each class."""


class SwarmPeer(Part):
    name: str
    credited: str
    """Under which name its work is counted."""
    peer: str
    """Its id."""
    role: Literal["creator", "public", "client"]
    """Others reach a public one; a client only calls out."""
    round: int
    seconds_ago: float
    group: int
    """Peers that averaged together; 0: it went on alone."""
    parts: int
    """Parts of the average that reached it, of `expected`."""
    expected: int
    samples: int
    samples_per_sec: float
    loss: float | None
    sent: int
    """Bytes for the round."""
    received: int


class SwarmStatus(Answer):
    name: str
    round: int
    rounds: int
    running: bool
    samples_per_sec: float
    loss: float | None
    """Mean over the peers' samples of their last round."""
    val: dict[str, float | None]
    """`loss` and the task's headline, validated by the creator."""
    peers: list[SwarmPeer]
    contributions: list[Contribution]
    """By name, most samples first; `rounds` is how many averages had something of it, and `seconds` their length."""
