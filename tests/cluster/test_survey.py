"""Survey of a site: its answers, and its gaps.

The text of 22.05 is as a cluster printed it, varied here by what one small cluster does not have. What several versions
print of the same cluster is in test_slurm_versions.py.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import cluster
from tests.runs import script
from trainkit.cluster import site_profile
from trainkit.cluster import survey as read
from trainkit.cluster.site import read_nodes, read_partitions
from trainkit.cluster.site_profile import ClusterAccount, facts_of, read_facts
from trainkit.cluster.slurm_commands import read_config
from trainkit.cluster.survey import ask_site
from trainkit.common import process
from trainkit.common.errors import SchedulerError, UserError

Fake = Callable[[str, str], Path]

CONFIG_22_05 = """\
Configuration data as of 2026-11-21T19:12:29
AccountingStorageEnforce = none
ClusterName             = devcluster
KillWait                = 5 sec
MaxArraySize            = 1001
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SelectType              = select/cons_tres
SLURM_VERSION           = 22.05.8
SlurmctldParameters     = (null)

Slurmctld(primary) at here is UP
"""
# An older site without cons_tres, and a newer one that enforces accounts and sends a job's own signal.
CONFIG_20_11 = CONFIG_22_05.replace("22.05.8", "20.11.9").replace("cons_tres", "cons_res")
CONFIG_24_05 = (
    CONFIG_22_05.replace("22.05.8", "24.05.3")
    .replace("Enforce = none", "Enforce = associations,limits,qos")
    .replace("KillWait                = 5 sec", "KillWait                = 30 sec")
    .replace("PreemptMode ", "PreemptParameters       = send_user_signal\nPreemptMode ")
)
PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=vision,nlp AllowQos=normal,long AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=00:10:00 MaxNodes=20 MaxTime=3-00:00:00 MinNodes=0 Nodes=g[1-3] PreemptMode=OFF State=UP TotalNodes=3 \
SelectTypeParameters=NONE JobDefaults=DefMemPerGPU=29440 DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
PartitionName=spare AllowGroups=ALL AllowAccounts=ALL DenyAccounts=guest AllowQos=ALL Default=NO MaxNodes=UNLIMITED \
MaxTime=UNLIMITED MinNodes=2 Nodes=c1 PreemptMode=REQUEUE State=UP JobDefaults=(null) DefMemPerCPU=3875 \
MaxMemPerNode=120000
PartitionName=old AllowQOS=ALL AllowAccounts=ALL MaxNodes=1 MaxTime=15:00 Nodes=c1 State=DRAIN DefMemPerNode=UNLIMITED
"""
NODES = """\
NodeName=g1 CPUTot=32 AvailableFeatures=a100,ib ActiveFeatures=a100 Gres=gpu:a100:4(S:0-1) RealMemory=515000 \
State=IDLE
NodeName=g2 CPUTot=32 AvailableFeatures=a100,ib Gres=gpu:a100:4(S:0-1) RealMemory=515000 MemSpecLimit=0 \
State=MIXED+PLANNED
NodeName=g3 CPUEfctv=30 CPUTot=32 AvailableFeatures=(null) Gres=gpu:v100:2,shard:8(S:0-1) RealMemory=256000 \
MemSpecLimit=6000 State=IDLE*+DRAIN
NodeName=c1 CPUTot=64 Gres=(null) RealMemory=1 State=IDLE+CLOUD+POWERED_DOWN
"""
ASSOCIATIONS = (
    "ann|vision|alpha|vision||normal,long\nann|vision|alpha|nlp|gpu|normal\nann|other|beta|beta-only||normal\n"
)


def test_limits_of_partitions_and_who_may_use_them_and_their_nodes_are_read() -> None:
    gpu, spare, old = read_partitions(PARTITIONS, read_nodes(NODES))
    assert (gpu.accounts, gpu.qos, gpu.max_nodes, gpu.max_time_min) == (("vision", "nlp"), ("normal", "long"), 20, 4320)
    assert (spare.accounts, spare.max_mem_mb, spare.min_nodes) == ((), 120000, 2)
    assert (gpu.has_memory_default, spare.has_memory_default, old.has_memory_default) == (True, True, False)
    assert (spare.preempt_mode, old.up, old.max_time_min) == ("REQUEUE", False, 15)

    g1, _, g3, c1 = read_nodes(NODES).values()
    assert (g1.mem_mb, g1.gpu_types, g1.features) == (515000, ("a100",), ("a100", "ib"))
    assert (g3.mem_mb, g3.cpus, g3.gpu_types, g3.up) == (250000, 30, ("v100",), False)
    assert (g1.shares, g3.shares, c1.shares) == ({"mps": 0, "shard": 0}, {"mps": 0, "shard": 4}, {})
    assert c1.mem_mb is None, "1 MB is what SLURM says where nobody has configured it"
    found = facts_of(gpu)  # by kind
    assert [(kind.count, kind.gpus, kind.gpu_types) for kind in found.nodes] == [(2, 4, ("a100",)), (1, 2, ("v100",))]
    assert (found.max_time, found.preempt_mode) == ("3-0:00:00", "")


def test_a_node_that_is_powered_down_takes_jobs_and_a_broken_one_does_not() -> None:
    ups = ("IDLE+CLOUD+POWERED_DOWN", "IDLE+CLOUD+POWERING_DOWN", "IDLE~", "MIXED")
    downs = (
        "DOWN*", "DOWN+CLOUD+POWERED_DOWN", "IDLE+DRAIN", "IDLE+NOT_RESPONDING", "ALLOCATED+MAINT", "UNKNOWN*", "FUTURE"
    )  # fmt: skip
    lines = [f"NodeName={state} CPUTot=4 Gres=(null) State={state} ThreadsPerCore=1" for state in ups + downs]
    assert [name for name, node in read_nodes("\n".join(lines)).items() if node.up] == [*ups]


def test_who_is_preempted_and_how_is_read() -> None:
    texts = (CONFIG_24_05, CONFIG_22_05.replace("partition_prio", "none"))
    preempted = [read.read_preemption(read_config(text)) for text in texts]
    assert preempted == ["partition_prio, REQUEUE, with the job's own signal", ""]


def test_only_file_systems_that_others_see_are_called_shared() -> None:
    mounts = """\
/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
nas:/home /home nfs4 rw 0 0
10.0.0.1@o2ib:/work /work lustre rw 0 0
s3 /data\\040sets fuse.s3fs rw 0 0
nas:/boot /boot/images nfs rw 0 0
"""
    assert read.read_shared_folders(mounts) == ("/home", "/work", "/data sets")


# Asked for


def slurm(fake: Fake, config: str = CONFIG_24_05, *, scontrol_node: str | None = None) -> None:
    node = f"cat <<'E'\n{NODES}\nE" if scontrol_node is None else scontrol_node
    answers = f"config) cat <<'E'\n{config}\nE\n;; partition) cat <<'E'\n{PARTITIONS}\nE\n;; node) {node}\n;;"
    fake("scontrol", f"case $2 in {answers} esac")
    accounts = ASSOCIATIONS.replace("alpha", "devcluster")
    fake("sacctmgr", f"if [ $3 = user ]; then cat <<'E'\n{accounts}\nE\nelse echo 'normal||'; fi")
    fake("srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'")
    fake("apptainer", "exit 0")


def test_a_site_is_asked_with_few_calls_and_tells_everything(fake_command: Fake, tmp_path: Path) -> None:
    slurm(fake_command)
    facts = ask_site(dict(os.environ))
    assert (facts.cluster, facts.version, facts.gpu_dialect) == ("devcluster", "24.05.3", "gpus-per-node")
    assert (facts.max_array_size, facts.kill_wait_seconds, facts.accounts_enforced) == (1001, 30, True)
    assert [partition.name for partition in facts.partitions] == ["gpu", "spare", "old"]
    vision = ClusterAccount("vision", "", ("normal", "long"), default=True)
    assert facts.accounts == (vision, ClusterAccount("nlp", "gpu", ("normal",))), "of this cluster"
    assert facts.containers[:2] == ("pyxis", "apptainer")
    assert facts.gaps == ()
    assert [len((tmp_path / f"{name}.calls").read_text().splitlines()) for name in ("scontrol", "sacctmgr")] == [3, 2]


def test_what_is_missing_or_refused_is_a_gap_with_its_reason(fake_command: Fake) -> None:
    slurm(fake_command, scontrol_node="echo 'slurm_load_node error: Access/permission denied' >&2; exit 1")
    fake_command("sacctmgr", "echo 'sacctmgr: error: Sending PersistInit msg: Connection refused' >&2; exit 1")
    facts = ask_site(dict(os.environ))
    assert facts.gaps == (
        "scontrol show node: slurm_load_node error: Access/permission denied",
        "sacctmgr -nP show user: sacctmgr: error: Sending PersistInit msg: Connection refused",
    )
    assert [(item.name, item.nodes) for item in facts.partitions] == [("gpu", ()), ("spare", ()), ("old", ())]
    assert facts.accounts == ()


def test_a_command_that_was_silent_is_not_asked_again(
    fake_command: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(fake_command)
    fake_command("scontrol", "exec sleep 60")
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.5)
    facts = ask_site(dict(os.environ))
    assert facts.gaps == tuple(f"scontrol show {what}: no answer within 0.5 s" for what in ("config", "partition"))
    assert len((tmp_path / "scontrol.calls").read_text().splitlines()) == 1
    assert facts.partitions == ()


def test_what_cannot_be_read_is_a_gap(fake_command: Fake) -> None:
    slurm(fake_command, scontrol_node="echo 'NodeName=g1 CPUTot=32x Gres=(null) State=IDLE'")
    facts = ask_site(dict(os.environ))
    assert facts.gaps[0] == "scontrol show: cannot be read: invalid literal for int() with base 10: '32x'"
    assert (facts.version, facts.partitions) == ("24.05.3", ())


def test_a_silent_scheduler_renews_no_profile_and_is_not_called_absent(
    fake_command: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(fake_command)
    monkeypatch.chdir(tmp_path)
    cluster.main(["discover", "mine"], os.environ)
    profile = tmp_path / "configs" / "clusters" / "mine.yaml"
    before = profile.read_bytes()
    for name in ("sacctmgr", "scontrol", "srun"):
        fake_command(name, "exec sleep 60")
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(SchedulerError, match="does not answer"):
        cluster.main(["show"], os.environ)
    slurm(fake_command)
    fake_command("sacctmgr", "exec sleep 60")
    with pytest.raises(SchedulerError, match=r"mine\.yaml was not changed"):
        cluster.main(["discover", "mine", "--force"], os.environ)
    assert profile.read_bytes() == before


@pytest.mark.parametrize(
    ("config", "node", "dialect"),
    [
        (CONFIG_20_11, None, "gres"),  # without cons_tres
        (CONFIG_24_05, "echo 'NodeName=g1 CPUTot=12 AvailableFeatures=gpu,p100 Gres=(null) State=IDLE'", "constraint"),
    ],
)
def test_gpus_are_asked_for_as_the_site_knows_them(
    fake_command: Fake, config: str, node: str | None, dialect: str
) -> None:
    slurm(fake_command, config, scontrol_node=node)
    assert ask_site(dict(os.environ)).gpu_dialect == dialect


@pytest.mark.parametrize("variable", ["LMOD_CMD", "MODULES_CMD"])  # of Lmod, of Environment Modules from 4 on
def test_modules_that_training_may_need_are_listed(tmp_path: Path, variable: str) -> None:
    modules = "/opt/modules: python/3.11 python/3.12'(default)' gcc/13 lang/CUDA/12.4 pytorch openfoam/11"
    script(tmp_path / "lmod", f"[ \"$*\" = 'bash -t avail' ] && printf '%s\\n' {modules} >&2")
    facts = ask_site({"PATH": str(tmp_path), variable: str(tmp_path / "lmod")})
    assert facts.modules == ("python/3.11", "python/3.12", "lang/CUDA/12.4", "pytorch")


# Kept


def test_what_is_written_into_a_profile_is_read_back(fake_command: Fake, tmp_path: Path) -> None:
    slurm(fake_command)
    facts = ask_site(dict(os.environ))
    profile = tmp_path / "mine.yaml"
    profile.write_text(site_profile.to_profile(facts))
    assert read_facts(str(profile)) == facts
    profile.write_text("launch: {partition: gpu}\n")
    assert read_facts(str(profile)) is None, "settings alone know nothing of a site"


def test_a_damaged_profile_is_refused_at_its_line(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("launch: {}\nsite:\n  version: '24.05'\n  max_array_size: many\n")
    with pytest.raises(UserError) as refused:
        read_facts(str(profile))
    assert f"{profile}:4" in refused.value.what
    assert "max_array_size" in refused.value.why


def test_partition_facts_of_an_older_kit_are_still_read(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("site: {cluster: a, partitions: [{name: gpu, from_the_future: 1}]}\n")
    known = read_facts(str(profile))
    assert known is not None
    assert known.partitions == (site_profile.PartitionFacts("gpu"),)
