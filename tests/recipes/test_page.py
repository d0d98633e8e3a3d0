"""Commands in docs/assignments are typed here, and give what the assignment asks for."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import containers, readme
from tests.recipes.student import PROJECT, Student, small, together
from tests.runs import last_event, wait_until
from trainkit.common.hosts import free_port
from trainkit.report.facts import Facts
from trainkit.run.folder import RunDir

CINIC, IMAGENET, FASHION, VIT, FAST = (
    readme.ASSIGNMENTS / f"{name}.md" for name in ("cinic10", "imagenet", "fashion-mnist", "vit", "cifar10-fast")
)


@pytest.fixture
def student(tmp_path: Path, fetched: dict[str, list[Path]]) -> Callable[..., Student]:
    """Makes a student who has archives of some data sets; those that one fetches by hand are in the folder ``data``."""

    def make(name: str, *data_sets: str) -> Student:
        made = Student(tmp_path / name)
        for data_set in data_sets:
            folder = made.home / ("data" if data_set in ("cinic10", "imagenet") else "fetched")
            folder.mkdir(exist_ok=True)
            for file in fetched[data_set]:
                shutil.copy(file, folder)
        return made

    return make


def facts(student: Student, name: str) -> Facts:
    return Facts(RunDir.open(student.home / "runs" / name), name)


def book(student: Student, folder: str) -> str:
    """The log book in a folder of theirs, which must lie beside its page."""
    assert (student.home / folder / "report.html").is_file()
    return (student.home / folder / "logbook.md").read_text("utf-8")


def share_secret(nodes: list[Student]) -> None:
    """The file that the page tells users to make on both machines."""
    for node in nodes:
        (node.home / "run.secret").write_text("known to this test only")
        (node.home / "run.secret").chmod(0o600)


def two_machines(lines: list[str], nodes: list[Student]) -> list[str]:
    """The lines for two machines that are both this one; what each said."""
    assert [re.findall(r"--node-rank (\d)", line) for line in lines] == [["0"], ["1"]]
    share_secret(nodes)
    port = free_port()
    here = [f"{line} --master-port {port}".replace("node0.example.org", "127.0.0.1") for line in lines]
    return together(list(zip(nodes, here, strict=True)))


@pytest.mark.long
def test_cinic_10_tells_whether_amp_a_second_gpu_and_a_second_node_help(student: Callable[..., Student]) -> None:
    me, other = student("me", "cinic10"), student("other", "cinic10")
    amp, gpus = readme.blocks("laptop", CINIC)
    (nodes,) = readme.blocks("two machines", CINIC)
    (after,) = readme.blocks("after the jobs", CINIC)

    me.types(amp)
    assert re.search(r"train\.precision`? \| `?fp32`? \| `?bf16", book(me, "logbook/amp"))
    for bench in ("cinic10-amp", "cinic10-batch"):
        assert {"results.json", "bench.svg"} <= {file.name for file in (me.home / "runs" / bench).iterdir()}

    me.types(gpus)
    assert "speed-up" in book(me, "logbook/two-gpus")
    assert [facts(me, name).setting("strategy.name") for name in ("cinic10-dp", "cinic10-ddp")] == ["dp", "ddp"]
    assert facts(me, "cinic10-ddp").started("world_size") == 2

    other.types(line for line in amp if "prepare" in line)
    two_machines(nodes, [me, other])
    assert facts(me, "cinic10-two-nodes").started("world_size") == 2
    assert (last_event(RunDir(me.home / "runs" / "cinic10-two-nodes"), "ended") or {})["state"] == "COMPLETED"
    me.types(after)
    assert "cinic10-two-nodes" in book(me, "logbook/two-nodes")


@pytest.mark.long
def test_imagenet_trains_on_one_machine(student: Callable[..., Student]) -> None:
    me = student("me", "imagenet")
    (lines,) = readme.blocks("laptop", IMAGENET)
    me.types(lines)
    run = facts(me, "imagenet-one")
    assert run.test is not None
    assert (run.setting("train.precision"), run.setting("schedule.name")) == ("o2", "onecycle")


@pytest.mark.long
@pytest.mark.skipif(not containers.can_run(), reason="this machine does not let us mount")
def test_imagenet_trains_on_two_machines_in_containers(student: Callable[..., Student], tmp_path: Path) -> None:
    # Both machines are this one: each has its clone and its /data, in a container of a stand-in for docker.
    (docker,) = readme.blocks("container", IMAGENET)[0]
    (setup, (reference,)) = readme.blocks("in the container", IMAGENET)
    (nodes,) = readme.blocks("in both containers", IMAGENET)
    (after,) = readme.blocks("after the jobs", IMAGENET)
    image = containers.install(tmp_path)
    vms, words = [student(f"vm{number}", "imagenet") for number in (0, 1)], docker.split()
    assert words[-1] == "nvcr.io/nvidia/pytorch:25.03-py3"
    assert setup[0] == "PIP_CONSTRAINT= pip install --quiet -e ."  # which CI does, with the README's first block
    share_secret(vms)
    port = free_port()
    inside = []
    for vm, node in zip(vms, nodes, strict=True):
        shutil.copytree(PROJECT / "jobs", vm.home / "jobs")
        shutil.copytree(PROJECT / "trainkit", vm.home / "trainkit")
        shutil.copytree(PROJECT / "configs", vm.home / "configs")
        start = " ".join(words[:-1]).replace("-v /data:", f"-v {vm.home / 'data'}:")
        here = small(f"{node} --master-port {port}".replace("node0.example.org", "127.0.0.1"))
        script = " && ".join([*setup[1:], here, *([small(reference), *after] if vm is vms[0] else [])])
        inside.append(
            (vm, f"{start} {image} env PATH={Path(sys.executable).parent}:$PATH bash -ec {shlex.quote(script)}")
        )
        vm.variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    together(inside)
    assert facts(vms[0], "imagenet-two").started("world_size") == 2
    assert "imagenet-two" in book(vms[0], "logbook")


@pytest.mark.long
def test_fashion_mnist_trains_loads_and_infers(student: Callable[..., Student]) -> None:
    me = student("me", "fashion_mnist")
    for lines in readme.blocks("laptop", FASHION):
        me.types(lines)
    assert facts(me, "fashion-cpu").setting("model.name") == "fashion_cnn"
    assert "fashion-gpu" in book(me, "logbook/gpu")
    for bench in ("fashion-loader", "fashion-inference"):
        assert {"results.json", "bench.svg"} <= {file.name for file in (me.home / "runs" / bench).iterdir()}


@pytest.mark.long
def test_azures_job_trains_with_the_variables_that_azure_gives(student: Callable[..., Student]) -> None:
    me = student("me", "fashion_mnist")
    me.types(["python -m jobs.prepare fashion_mnist"])
    (text,) = re.findall(r"```yaml\n(# job\.yml\n.*?)```", FASHION.read_text("utf-8"), re.DOTALL)
    job = yaml.safe_load(text)
    install, _, command = job["command"].partition(" && ")
    assert install == "pip install --quiet -e ."  # which CI does, with the README's first block
    command = readme.by_module(command)
    nodes, each = job["resources"]["instance_count"], job["distribution"]["process_count_per_instance"]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "AZUREML_NODE_COUNT": str(nodes)}
    ranks = []
    for rank in range(nodes * each):
        place = {"RANK": rank, "LOCAL_RANK": rank % each, "NODE_RANK": rank // each, "WORLD_SIZE": nodes * each}
        own = Student(
            me.home / ".ranks" / str(rank), {**common, **{name: str(number) for name, number in place.items()}}
        )
        ranks.append((own, f"cd {me.home} && exec {small(command.replace('${{inputs.data}}', 'data'))}"))
    together(ranks)
    run = Facts(RunDir.open(me.home / "outputs" / "run"), "")
    assert (run.finished, run.started("world_size")) == (True, 2)
    me.types(["python -m jobs.report outputs/run"])


@pytest.mark.long
def test_the_vit_gives_all_that_its_assignment_asks_for(
    student: Callable[..., Student], bucket: str, vit_weights: Path
) -> None:
    me, other = student("me", "cifar10"), student("other", "cifar10")
    local = f"model.pretrained_cfg_overlay='{{file: {vit_weights}}}'"  # as the page says, where there is no internet
    (first,) = readme.blocks("laptop", VIT)
    me.types(f"{line} {local}" if "submit" in line else line for line in first)
    assert facts(me, "vit-sim").started("world_size") == 4

    (nodes,) = readme.blocks("two machines", VIT)
    other.types(line for line in first if "prepare" in line)
    for strategy in ("fsdp", "ddp"):  # the second, with four GPUs each, is the cluster's: tests/slurm/test_pages.py
        here = [line.replace("s3://my-bucket", bucket).replace("fsdp", strategy) for line in nodes]
        two_machines([f"{line} {local}" for line in here], [me, other])
        assert facts(me, f"vit-{strategy}").setting("strategy.name") == strategy

    (report, evaluate) = readme.blocks("after the jobs", VIT)[0]
    me.types([report])
    said = me.types([evaluate.replace("s3://my-bucket", bucket)])
    tested = facts(me, "vit-fsdp").test
    assert tested is not None
    assert f"{tested['acc1']:.2f}" in said, "the weights in the bucket are the best ones"
    for asked in ("val, best checkpoint", "test, best checkpoint", "training time", "peak memory", "utilisation",
                  "batch size", "speed-up", f"{bucket}/vit-fsdp", f"{bucket}/vit-ddp"):  # fmt: skip
        assert asked in book(me, "logbook"), asked


@pytest.mark.long
def test_five_seeds_of_the_fast_recipe_become_one_table(student: Callable[..., Student]) -> None:
    me = student("me", "cifar10")
    (lines,) = readme.blocks("laptop", FAST)
    said = me.types(lines)
    assert len(list((me.home / "runs" / "fast").glob("[0-4]/summary.json"))) == 5
    assert re.search("test acc1", said)


@pytest.mark.long
def test_a_machine_that_people_share_trains_when_the_connection_is_lost(student: Callable[..., Student]) -> None:
    me = student("me")
    (lines,) = readme.blocks("laptop", readme.SLURM)
    # Nobody has GPUs here: two ranks on the CPU.
    me.types(re.sub("--gpus-per-node 2", "--gpus-per-node 0 --ntasks-per-node 2", line) for line in lines)
    run = RunDir(me.home / "runs" / "ddp-0001")
    assert wait_until(lambda: last_event(run, "ended"), 200)["state"] == "COMPLETED"
