"""One small cluster as several versions of SLURM describe it: each is read for the same.

``recorded/VERSION.yaml`` holds what that version printed. Node n2 is drained, partition `low` is for account root and
takes no jobs, `high` is for two accounts and one hour on one node; jobs 1 to 27 wait for whatever one can wait for.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.conftest import GPU_SITE
from trainkit.cluster import survey as read
from trainkit.cluster.site import Partition, leading_number, read_nodes, read_partitions
from trainkit.cluster.site_profile import ClusterAccount, Qos
from trainkit.cluster.slurm import Slurm
from trainkit.cluster.slurm_commands import Jobs, read_config, read_sacct, read_squeue, read_start
from trainkit.cluster.slurm_submission import batch_script, read_scripts
from trainkit.config.loading import load, to_yaml
from trainkit.diagnosis.causes import cause_of
from trainkit.launch.planning import make_plan
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

RECORDED = {path.stem: path for path in sorted(Path(__file__).with_name("recorded").glob("*.yaml"))}


@pytest.fixture(params=RECORDED)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def said(version: str) -> dict[str, Any]:
    return dict(yaml.safe_load(RECORDED[version].read_text()))


def test_old_and_new_versions_are_recorded() -> None:
    assert list(RECORDED) == ["20.11.9", "22.05.8", "23.11.11", "25.11.7"]


def by_name(partitions: tuple[Partition, ...]) -> dict[str, Partition]:
    return {partition.name: partition for partition in partitions}


def test_partitions_are_read_with_their_limits_and_nodes(said: dict[str, Any]) -> None:
    found = by_name(read_partitions(said["partitions"], read_nodes(said["nodes"])))
    main, low, high = found["main"], found["low"], found["high"]
    nodes = [(node.name, node.cpus, node.gpus, node.mem_mb, node.up) for node in main.nodes]
    assert nodes == [("n1", 4, 2, 8000, True), ("n2", 4, 2, 8000, False)]
    assert (main.default, main.up, main.max_time_min, main.max_nodes, main.accounts) == (True, True, None, None, ())
    assert (low.up, low.accounts, low.preempt_mode) == (False, ("root",), "REQUEUE")
    assert (high.max_time_min, high.max_nodes, high.accounts, high.qos) == (60, 1, ("vision", "nlp"), ("normal",))


def test_the_configuration_is_read(said: dict[str, Any], version: str) -> None:
    config = read_config(said["config"])
    assert config["SLURM_VERSION"] == version
    assert (leading_number(config["KillWait"]), leading_number(config["MaxArraySize"])) == (5, 1001)
    told = (config["SelectType"], config["AccountingStorageEnforce"], read.read_preemption(config))
    assert told == ("select/cons_tres", "associations,limits,qos", "partition_prio, REQUEUE")


def test_a_version_that_cannot_expedite_says_so(
    said: dict[str, Any], version: str, fake_command: Callable[[str, str], Path]
) -> None:
    """Of those recorded 25.11 alone has it, and its site must allow it."""
    scontrol = "cat <<'END'\n" + said["config"] + "\nEND"
    fake_command("scontrol", scontrol)
    is_new = version == "25.11.7"
    why = "the site does not allow it (SlurmctldParameters=enable_expedited_requeue)"
    assert Slurm().can_expedite() == (why if is_new else f"it needs SLURM 25.11, and this is {version}")
    allowed = re.sub(r"^(SlurmctldParameters +=).*$", r"\1 enable_expedited_requeue", said["config"], flags=re.M)
    fake_command("scontrol", scontrol.replace(said["config"], allowed))
    assert (Slurm().can_expedite() == "") == is_new
    plan = make_plan(load("ddp", flags={"launch.requeue": ("expedite", "given")}), GPU_SITE, Path("/runs/ddp"))
    found = {item.name: item.value for item in plan.directives}
    assert found["requeue"] == ("expedite" if is_new else None)
    assert ("#SBATCH --requeue=expedite\n" in batch_script(plan, Path("/runs/ddp"), Path("/home"))) == is_new
    assert plan.requeue is True


def test_accounts_and_qos_of_the_user_are_read(said: dict[str, Any]) -> None:
    accounts = read.read_accounts(said["associations"], "devcluster")
    assert ClusterAccount("vision", "", ("normal", "weekly")) in accounts
    assert {account.name for account in accounts} == {"root", "vision", "nlp", "small", "many"}
    assert [account.name for account in accounts if account.default] == ["root"]
    assert Qos("weekly", "7-00:00:00", "gres/gpu=2") in read.read_qos(said["qos"])


def test_the_queue_tells_what_jobs_do_and_wait_for(said: dict[str, Any]) -> None:
    jobs = read_squeue(said["squeue"])
    assert len(jobs) == len(said["squeue"].splitlines()), "no line is lost"
    assert (jobs["1"].state, jobs["1"].nodes, jobs["1"].reason) == ("RUNNING", "n1", "")
    assert (jobs["18"].state, jobs["18"].reason, jobs["20"].state) == ("FAILED", "NonZeroExitCode", "CANCELLED")
    assert (jobs["15_1"].state, jobs["15_1"].reason) == ("PENDING", "JobArrayTaskLimit")
    assert jobs["2"].reason == "AssocGrpNodeLimit"
    assert "Invalid job id" in said["forgotten"]


def test_the_accounts_tell_how_jobs_ended_and_that_a_requeued_one_waits(said: dict[str, Any]) -> None:
    jobs = read_sacct(said["sacct"])
    assert (jobs["18"].state, jobs["18"].reason) == ("FAILED", "exit code 3:0")
    assert (jobs["20"].state, jobs["21"].state, jobs["19"].nodes) == ("CANCELLED", "PENDING", "")
    waiting = Jobs(jobs).of("15_1")
    assert waiting is not None, "the row 15_[1%1]"
    assert (waiting.job_id, waiting.state) == ("15_1", "PENDING")


def test_scripts_of_jobs_are_read_where_the_version_keeps_them(said: dict[str, Any], version: str) -> None:
    assert read_scripts(said["scripts"])["25"] == "/home/ann/lab/s.sh"
    lines = read_scripts(said["submit_lines"])  # not before 21.08
    assert lines.get("1") == (None if version == "20.11.9" else "sbatch --parsable -A vision -t 5 s.sh")


def test_the_guess_of_sbatch_and_its_refusals_are_read(said: dict[str, Any]) -> None:
    start = read_start(said["test_only"])
    assert start.when is not None
    assert (start.when.date().isoformat(), start.nodes, start.refusal) == ("2026-11-21", "n[1-2]", "")
    assert {flags: read_start(text).refusal for flags, text in said["test_only_refused"].items()} == {
        "-p nosuch": "Invalid partition name specified",
        "-N 9": "Requested node configuration is not available",
        "-A nosuch": "Invalid account or account/partition combination specified",
        "-A nlp -q nosuch": "Invalid qos specification",
    }
    assert all(read_start(text).answered for text in said["test_only_refused"].values())


@pytest.mark.parametrize(
    "text", ["", "allocation failure: Unable to contact slurm controller (connect failure)", "sbatch: Socket timed out"]
)
def test_a_controller_that_does_not_answer_refuses_nothing(text: str) -> None:
    assert (read_start(text).when, read_start(text).answered) == (None, False)


WAITS = {
    "2": "association-limit", "4": "association-limit", "5": "policy-limit", "6": "association-limit",
    "7": "policy-limit", "10": "policy-limit", "11": "policy-limit", "13": "association-limit", "14": "held",
    "15_1": "waits", "16": "waits-for-job", "17": "partition-limit", "19": "waits", "21": "waits",
    "25": "time-asked", "26": "dependency-never",
}  # fmt: skip


def test_why_knows_what_every_job_of_the_queue_waits_for(said: dict[str, Any], tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "ddp-0001", to_yaml(load("ddp").config))
    append_event(run, "submitted", executor="slurm", job_id="1")
    pending = {job_id: job for job_id, job in read_squeue(said["squeue"]).items() if job.state == "PENDING"}
    causes = {job_id: cause_of(run, job) for job_id, job in pending.items()}
    assert {job_id: cause.name if cause else None for job_id, cause in causes.items() if job_id in WAITS} == WAITS
    assert all(causes.values()), "nor is there one that it has no word for"
    not_permitted = {job.reason.partition(" not permitted")[0]: causes[job_id] for job_id, job in pending.items()}
    for words, name in (("Job's account", "invalid-account"), ("Job's QOS", "invalid-qos")):
        if cause := not_permitted.get(words):
            assert cause.name == name
