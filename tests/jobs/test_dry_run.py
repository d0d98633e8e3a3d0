"""``submit --dry-run``: what it expects of the training is what that does; and ``submit --estimate``."""

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.jobs.conftest import Command
from tests.rank_functions import run_command
from tests.runs import script
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

QUICK = ("train.epochs=1", "schedule.warmup_epochs=0", "monitor.loggers=[jsonl]")
NAMES = ("total_steps", "precision", "micro_batch_size", "grad_accum_steps")
Expected = Callable[..., dict[str, tuple[str, str]]]


@pytest.fixture
def expected(command: Command) -> Expected:
    """Name -> value and the rest of its line, of what a dry run derives."""

    def of(*arguments: str) -> dict[str, tuple[str, str]]:
        done = command("submit", *arguments, "--dry-run").ok()
        found = {}
        for line in done.err.splitlines():
            if name := next((name for name in NAMES if line.startswith(f"{name}  ")), None):
                value, _, rest = line.removeprefix(name).strip().partition("  ")
                found[name] = (value, " ".join(rest.split()))
        return found

    return of


@pytest.mark.nightly
@pytest.mark.usefixtures("no_slurm")
def test_what_a_dry_run_expects_is_what_the_run_does(expected: Expected, tmp_path: Path) -> None:
    arguments = ("single", *QUICK, "train.micro_batch_size=16")
    before = expected(*arguments)
    done = run_command("submit", *arguments, "--executor", "debug", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (started,) = read_events(RunDir(tmp_path / "runs" / "single-0001"), "started")
    assert {name: value for name, (value, _) in before.items()} == {name: str(started[name]) for name in NAMES}


@pytest.mark.usefixtures("no_slurm")
@pytest.mark.parametrize(
    ("arguments", "name", "value", "words"),
    [
        (["train.early_stopping_patience=2"], "total_steps", "380", "fewer if it stops early"),
        (["train.micro_batch_size=auto"], "micro_batch_size", "auto", "found before the first update"),
        (["train.micro_batch_size=16", "--nodes", "2"], "grad_accum_steps", "2", "64 / (2 x 16)"),
        (["--nodes", "2"], "micro_batch_size", "32", "whole share in one pass"),
    ],
)
def test_what_follows_from_the_settings_is_said_with_its_reason(
    expected: Expected, arguments: list[str], name: str, value: str, words: str
) -> None:
    told = expected("ddp", *arguments)[name]
    assert (told[0], words in told[1]) == (value, True), told


@pytest.mark.usefixtures("fake_slurm")
def test_precision_is_the_nodes_and_a_swarm_has_no_number_of_updates(expected: Expected) -> None:
    assert "from Ampere on" in expected("ddp", "--gpus-per-node", "2")["precision"][1]
    assert "AVX512-BF16" in expected("ddp", "--gpus-per-node", "0")["precision"][1]
    assert "total_steps" not in expected("hivemind")


# When it would start

PARTITION = "PartitionName={} Default={} MaxNodes=UNLIMITED MaxTime={} Nodes=n[1-2] State={}"
PARTITIONS = [
    PARTITION.format("slow", "YES", "UNLIMITED", "UP"),
    PARTITION.format("fast", "NO", "UNLIMITED", "UP"),
    PARTITION.format("short", "NO", "10:00", "UP"),
    PARTITION.format("closed", "NO", "UNLIMITED", "DRAIN"),
    PARTITION.format("full", "NO", "UNLIMITED", "UP"),
]
NODES = [f"NodeName=n{index} CPUTot=8 Gres=gpu:4 State=IDLE" for index in (1, 2)]
UNAVAILABLE = "Requested node configuration is not available"
Estimate = Callable[..., list[str]]


def site(folder: Path, partitions: list[str], nodes: list[str]) -> None:
    text = "\n".join(["if [ $2 = node ]; then cat <<'E'", *nodes, "E", "else cat <<'E'", *partitions, "E", "fi"])
    script(folder / "scontrol", text)


@pytest.fixture
def partitions(fake_slurm: Path) -> Path:
    """A login node with five partitions, whose sbatch tells when a job would start; the file of its calls."""
    site(fake_slurm, PARTITIONS, NODES)
    calls, now = fake_slurm / "sbatch.calls", datetime.now()
    says = [f'echo "$* $(grep -c SBATCH)" >> {calls}', 'case "$*" in']
    for name, when in (("slow", now + timedelta(hours=5)), ("fast", now + timedelta(minutes=20))):
        said = f"sbatch: Job 1 to start at {when:%Y-%m-%dT%H:%M:%S} using 8 processors on nodes n1"
        says.append(f"*={name}*) echo '{said}' >&2 ;;")
    script(
        fake_slurm / "sbatch", "\n".join([*says, f"*) echo 'allocation failure: {UNAVAILABLE}' >&2; exit 1;;", "esac"])
    )
    return calls


def test_an_estimate_asks_each_partition_for_the_job_and_queues_nothing(
    command: Command, partitions: Path, tmp_path: Path
) -> None:
    """The soonest comes first."""
    done = command("submit", "ddp", "--estimate").ok("in 20 min, on n1", "in 5 h", f"full   no: {UNAVAILABLE}")
    assert [line.split()[0] for line in done.out.splitlines()] == ["fast", "slow", "short", "full"]
    done = command("submit", "ddp", "--time", "1:00:00", "--estimate")
    assert "short  no: --time 1:00:00 is over the limit of partition 'short' (flag --time)." in done.out
    calls = partitions.read_text().splitlines()
    assert (len(calls), all(call.startswith("--test-only") for call in calls)) == (4 + 3, True)
    assert not (tmp_path / "runs").exists()


def test_only_the_partitions_that_are_named_are_asked_and_of_those_four(
    command: Command, partitions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command("submit", "ddp", "--estimate", "--partition", "slow,fast")
    assert [line.split()[0] for line in done.out.splitlines()] == ["fast", "slow"]
    assert len(partitions.read_text().splitlines()) == 2
    more = [PARTITION.format(f"slow{n}", "NO", "UNLIMITED", "UP") for n in (2, 3)]
    site(partitions.parent, [*PARTITIONS, *more], NODES)
    done = command("submit", "ddp", "--estimate", "--partition", "slow,fast,full,slow2,slow3")
    assert "slow3  unknown: not asked" in done.out
    assert len(partitions.read_text().splitlines()) == 2 + 4
    monkeypatch.setenv("SBATCH_PARTITION", "fast")
    assert [line.split()[0] for line in command("submit", "ddp", "--estimate").out.splitlines()] == ["fast"]


def test_an_estimate_is_of_the_script_that_would_be_submitted(command: Command, fake_slurm: Path) -> None:
    assert command("submit", "ddp").code == 0
    said = "sbatch: Job 1 to start at 2040-01-01T00:00:00 using 8 processors on nodes n1"
    script(fake_slurm / "sbatch", f"cat > {fake_slurm}/estimated.sbatch\necho '{said}' >&2")
    flags = ("--dependency", "afterok:ddp-0001", "--nodes", "2", "seed=1")
    assert command("submit", "ddp", *flags, "--estimate").code == 0
    text = (fake_slurm / "estimated.sbatch").read_text()
    assert "#SBATCH --dependency=afterok:4711\n" in text
    assert text == command("submit", "ddp", *flags, "--partition", "main", "--dry-run").out


def test_where_no_partition_takes_the_job_the_estimate_is_a_refusal(
    command: Command, partitions: Path, tmp_path: Path
) -> None:
    command("submit", "ddp", "--estimate", "--partition", "full").refused(3, f"why: full: {UNAVAILABLE}.")
    for program in ("scontrol", "sinfo"):
        script(partitions.with_name(program), "")
    command("submit", "ddp", "--estimate").refused(3, "No partition of this cluster takes jobs.")
    assert not (tmp_path / "runs").exists()


def test_who_trains_on_the_cpu_beside_gpus_is_told(command: Command, partitions: Path) -> None:
    closed = [text.replace("YES", "NO").replace("Nodes=n[1-2] State=DRAIN", "Nodes=c1 State=UP") for text in PARTITIONS]
    site(partitions.parent, closed, [*NODES, "NodeName=c1 CPUTot=8 Gres=(null) State=IDLE"])
    said = "'closed' has no GPUs, so this trains on the CPU; these have some: slow, fast, short, full."
    assert said in command("submit", "ddp", "--partition", "closed", "--dry-run").err
    for flags in (("--partition", "closed", "--gpus-per-node", "0"), ("--partition", "slow")):
        assert "has no GPUs" not in command("submit", "ddp", *flags, "--dry-run").err


@pytest.mark.usefixtures("no_slurm")
def test_a_dry_run_says_how_training_images_grow(command: Command) -> None:
    settings = ("augment.min_size=16", "augment.ramp_epochs=[6,13]")
    done = command("submit", "single", "data.image_size=64", *settings, "--dry-run").ok()
    (line,) = (line for line in done.err.splitlines() if line.startswith("training images"))
    assert "16 px, growing" in line
    assert "up to epoch 6, then multiples of 32, and full size from epoch 13 on" in line
