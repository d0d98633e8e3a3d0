"""``submit --estimate``, and what `submit` refuses before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

PARTITIONS = """\
PartitionName=slow Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n[1-2] State=UP
PartitionName=fast Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n[1-2] State=UP
PartitionName=short Default=NO MaxNodes=UNLIMITED MaxTime=10:00 Nodes=n[1-2] State=UP
PartitionName=closed Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n[1-2] State=DRAIN
PartitionName=full Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n[1-2] State=UP"""
NODES = "\n".join(f"NodeName=n{index} CPUTot=8 Gres=gpu:4 State=IDLE" for index in (1, 2))


@pytest.fixture
def partitions(fake_slurm: Path) -> Path:
    """A login node with five partitions, whose sbatch tells when a job would start; the file of its calls."""
    (fake_slurm / "scontrol").write_text(
        f"#!/bin/bash\nif [ $2 = node ]; then cat <<'E'\n{NODES}\nE\nelse cat <<'E'\n{PARTITIONS}\nE\nfi\n"
    )
    now = datetime.now()
    starts = {"slow": now + timedelta(hours=5), "fast": now + timedelta(minutes=20)}
    lines = [
        f"  *={name}*) echo 'sbatch: Job 1 to start at {when:%Y-%m-%dT%H:%M:%S} using 8 processors on nodes n1' >&2 ;;"
        for name, when in starts.items()
    ]
    calls = fake_slurm / "sbatch.calls"
    (fake_slurm / "sbatch").write_text(
        f'#!/bin/bash\necho "$* $(grep -c SBATCH)" >> {calls}\ncase "$*" in\n'
        + "\n".join(
            [*lines, "  *) echo 'allocation failure: Requested node configuration is not available' >&2; exit 1;;"]
        )
        + "\nesac\n"
    )
    return calls


def test_an_estimate_names_the_soonest_partition_first_and_queues_nothing(
    command: Command, partitions: Path, tmp_path: Path
) -> None:
    done = command("submit", "ddp", "--estimate")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert [line[0] for line in lines] == ["fast", "slow", "short", "full"]
    assert "in 20 min, on n1" in done.out
    assert "in 5 h" in done.out
    assert "full   no: Requested node configuration is not available" in done.out
    assert all(call.startswith("--test-only") for call in partitions.read_text().splitlines())
    assert not (tmp_path / "runs").exists()


def test_a_partition_that_cannot_take_the_job_is_not_asked(command: Command, partitions: Path) -> None:
    done = command("submit", "ddp", "--time", "1:00:00", "--estimate")
    assert "short  no: --time 1:00:00 is over the limit of partition 'short' (flag --time)." in done.out
    assert len(partitions.read_text().splitlines()) == 3


def test_only_the_partitions_that_are_named_are_asked(
    command: Command, partitions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command("submit", "ddp", "--estimate", "--partition", "slow,fast")
    assert [line.split()[0] for line in done.out.splitlines()] == ["fast", "slow"]
    assert len(partitions.read_text().splitlines()) == 2
    monkeypatch.setenv("SBATCH_PARTITION", "fast")
    assert [line.split()[0] for line in command("submit", "ddp", "--estimate").out.splitlines()] == ["fast"]


def test_an_estimate_asks_for_four_partitions_at_most(command: Command, partitions: Path) -> None:
    names = ",".join(["slow", "fast", "full", "slow2", "slow3"])
    scontrol = partitions.with_name("scontrol")
    more = "\n".join(PARTITIONS.splitlines()[0].replace("slow", f"slow{n}").replace("YES", "NO") for n in (2, 3))
    scontrol.write_text(scontrol.read_text().replace(PARTITIONS, f"{PARTITIONS}\n{more}"))
    done = command("submit", "ddp", "--estimate", "--partition", names)
    assert "slow3  no: not asked" in done.out
    assert len(partitions.read_text().splitlines()) == 4


def test_an_estimate_is_of_the_script_that_would_be_submitted(command: Command, fake_slurm: Path) -> None:
    assert command("submit", "ddp").code == 0
    said = "sbatch: Job 1 to start at 2040-01-01T00:00:00 using 8 processors on nodes n1"
    (fake_slurm / "sbatch").write_text(f"#!/bin/bash\ncat > {fake_slurm}/estimated.sbatch\necho '{said}' >&2\n")
    flags = ("--dependency", "afterok:ddp-0001", "--nodes", "2", "seed=1")
    assert command("submit", "ddp", *flags, "--estimate").code == 0
    script = (fake_slurm / "estimated.sbatch").read_text()
    assert "#SBATCH --dependency=afterok:4711\n" in script
    dry = command("submit", "ddp", *flags, "--partition", "main", "--dry-run").out
    assert script == dry


def test_where_no_partition_takes_the_job_the_estimate_is_a_refusal(command: Command, partitions: Path) -> None:
    done = command("submit", "ddp", "--estimate", "--partition", "full")
    assert done.code == 3
    assert "why: full: Requested node configuration is not available." in done.err


def test_without_slurm_nobody_can_tell(command: Command, no_slurm: dict[str, str]) -> None:
    done = command("submit", "ddp", "--estimate")
    assert (done.code, done.out) == (3, "")
    assert "There is no SLURM on this machine." in done.err


# Refused before anything is written


def test_a_run_folder_in_memory_is_refused_before_it_is_made(command: Command, fake_slurm: Path) -> None:
    done = command("submit", "ddp", "--run-dir", "/dev/shm/trainkit-no-such-run")
    assert done.code == 3
    assert "is on this machine alone" in done.err
    assert not (fake_slurm / "submitted.sbatch").exists()
    assert not Path("/dev/shm/trainkit-no-such-run").exists()


def test_a_full_disk_is_refused_before_a_folder_is_made(
    command: Command, no_slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.site.profile.LEAST_MB", 10**12)
    done = command("submit", "ddp")
    assert (done.code, "There is no room for a run" in done.err) == (3, True)
    assert not (tmp_path / "runs").exists()


def test_data_and_a_folder_of_submission_that_nodes_do_not_see_are_refused(
    command: Command, fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("work/data", "laptop/data"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    profile = tmp_path / "site.yaml"
    profile.write_text(f"site: {{shared_folders: [{tmp_path}/work]}}\n")
    flags = ("--cluster", str(profile), "--run-dir", str(tmp_path / "work" / "x"), "--dry-run")
    monkeypatch.chdir(tmp_path / "laptop")
    assert f"The folder of the submission {tmp_path}/laptop is on this machine" in command("submit", "ddp", *flags).err
    monkeypatch.chdir(tmp_path / "work")
    done = command("submit", "ddp", *flags, f"data.root={tmp_path}/laptop/data")
    assert (done.code, "The data's folder" in done.err) == (3, True)
    assert command("submit", "ddp", *flags).code == 0


def test_an_environment_that_nodes_do_not_see_is_refused(
    command: Command, fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", "/opt/laptop/venv")
    profile = tmp_path / "site.yaml"
    profile.write_text(f"site: {{shared_folders: [{tmp_path}]}}\n")
    done = command("submit", "ddp", "--cluster", str(profile))
    assert done.code == 3
    assert "The virtual environment /opt/laptop/venv is on this machine alone." in done.err
    done = command("submit", "ddp", "--cluster", str(profile), "launch.environment=conda:x", "--dry-run")
    assert done.code == 0, done.err


def test_what_a_profile_knows_of_accounts_is_asked_of_nobody(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    (fake_slurm / "sacctmgr").write_text("#!/bin/bash\nexit 1\n")
    profile = tmp_path / "site.yaml"
    profile.write_text("site: {accounts: [{name: thesis}], accounts_enforced: true}\n")
    done = command("submit", "ddp", "--cluster", str(profile), "--account", "theses")
    assert done.code == 3
    assert "Account 'theses' is none of yours (flag --account)." in done.err
    assert "Did you mean 'thesis'?" in done.err
    assert command("submit", "ddp", "--cluster", str(profile), "--account", "thesis").code == 0


def test_a_submission_makes_three_calls(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    for name in ("sbatch", "scontrol", "squeue", "sacct", "sacctmgr", "sinfo"):
        script = fake_slurm / name
        body = script.read_text().partition("\n")[2] if script.exists() else "exit 1\n"
        script.write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{body}')
        script.chmod(0o755)
    assert command("submit", "ddp", "--account", "thesis", "--qos", "normal").code == 0
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["scontrol", "scontrol", "sbatch"]


@pytest.mark.parametrize(
    "words",  # the same in 20.11, 22.05, 23.11 and 25.11
    [
        "Invalid account or account/partition combination specified",
        "Invalid qos specification",
        "Job violates accounting/QOS policy (job submit limit, user size and/or time limits)",
    ],
)
def test_a_refused_account_or_qos_is_answered_with_the_list_of_ones_own(
    command: Command, fake_slurm: Path, words: str
) -> None:
    said = f"sbatch: error: Batch job submission failed: {words}"
    (fake_slurm / "sbatch").write_text(f"#!/bin/bash\necho '{said}' >&2\nexit 1\n")
    done = command("submit", "ddp", "--account", "thesis")
    assert (done.code, "jobs.cluster show" in done.err) == (4, True)
    (fake_slurm / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: Invalid feature specification' >&2\nexit 1\n")
    assert "jobs.cluster show" not in command("submit", "ddp", "--constraint", "x").err


def test_who_trains_on_the_cpu_beside_gpus_is_told(command: Command, partitions: Path) -> None:
    scontrol = partitions.with_name("scontrol")
    text = scontrol.read_text().replace(NODES, f"{NODES}\nNodeName=c1 CPUTot=8 Gres=(null) State=IDLE")
    scontrol.write_text(
        text.replace("Default=YES", "Default=NO").replace("Nodes=n[1-2] State=DRAIN", "Nodes=c1 State=UP")
    )
    said = (
        "Note: partition 'closed' has no GPUs, so this trains on the CPU; --partition slow (or fast, short, full) has"
    )
    assert said in command("submit", "ddp", "--partition", "closed", "--dry-run").err
    for flags in (("--partition", "closed", "--gpus-per-node", "0"), ("--partition", "slow")):
        assert "has no GPUs" not in command("submit", "ddp", *flags, "--dry-run").err


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import torch\ndef mlp(info)\n    pass\n", ":2 is not valid Python."),
        ("import torch\nimport no_such_package.nn\ndef mlp(info): ...\n", ":2 imports 'no_such_package.nn'"),
    ],
)
def test_a_users_module_that_cannot_be_imported_is_refused_at_its_line(
    command: Command, no_slurm: dict[str, str], tmp_path: Path, source: str, words: str
) -> None:
    name = f"broken_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    done = command("submit", "ddp", f"model.name={name}:mlp")
    assert done.code == 2
    assert f"{tmp_path}/{name}.py{words}" in done.err
    assert not (tmp_path / "runs").exists()


def test_a_guarded_import_or_one_of_the_container_is_let_pass(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    guarded = "try:\n    import no_such_package\nexcept ImportError:\n    pass\ndef mlp(info): ...\n"
    (tmp_path / "guarded_model.py").write_text(guarded)
    (tmp_path / "container_model.py").write_text("import no_such_package\ndef mlp(info): ...\n")
    assert command("submit", "ddp", "model.name=guarded_model:mlp", "--dry-run").code == 0
    inside = ("model.name=container_model:mlp", "launch.container_image=x.sif")
    assert "no_such_package" not in command("submit", "ddp", *inside, "--dry-run").err


def test_a_cluster_without_partitions_that_are_up_has_no_estimate(command: Command, fake_slurm: Path) -> None:
    for program in ("scontrol", "sinfo"):
        (fake_slurm / program).write_text("#!/bin/bash\n")
    done = command("submit", "ddp", "--estimate")
    assert done.code == 3
    assert "No partition of this cluster takes jobs." in done.err
