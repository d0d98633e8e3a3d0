"""What configs/recipes/README.md tells a student to type is typed here, and gives what the assignment asks for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import readme
from tests.recipes.student import Student, small, together
from trainkit.ranks.rendezvous import free_port
from trainkit.records.events import read_events
from trainkit.records.rundir import RunDir
from trainkit.report.facts import Facts

FASHION = "Fashion-MNIST: the loader, and DataParallel"
VIT_SECTION = "CIFAR-10 with a pretrained ViT-B/32: FSDP and DDP"
PLACES = {
    "laptop", "two machines", "slurm", "sbatch", "container", "in the container", "in both containers", "swarm",
    "after the jobs", "after the swarm",
}  # fmt: skip


def test_every_block_says_where_it_is_run() -> None:
    assert set(readme.marks(readme.RECIPES)) <= PLACES


@pytest.mark.parametrize("page", [readme.RECIPES], ids=lambda page: page.parent.name)
def test_every_link_of_a_page_resolves(page: Path) -> None:
    for file, place in readme.links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), file
        assert not place or place in readme.anchors(target), place


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


def two_machines(lines: list[str], nodes: list[Student]) -> list[str]:
    """The lines for two machines that are both this one; what each said."""
    assert [re.findall(r"--node-rank (\d)", line) for line in lines] == [["0"], ["1"]]
    port = free_port()
    here = [f"{line} --master-port {port}".replace("node0.example.org", "127.0.0.1") for line in lines]
    return together(list(zip(nodes, here, strict=True)))


@pytest.mark.long
def test_cinic_10_tells_whether_amp_a_second_gpu_and_a_second_node_help(student: Callable[..., Student]) -> None:
    me, other = student("me", "cinic10"), student("other", "cinic10")
    amp, gpus = readme.blocks("laptop", readme.RECIPES, "CINIC-10, a heavy network")
    (nodes,) = readme.blocks("two machines", readme.RECIPES, "CINIC-10, a heavy network")

    me.types(amp)
    table = (me.home / "logbook" / "amp" / "logbook.md").read_text()
    assert re.search(r"train\.precision \| fp32 \| bf16", table)
    assert [facts(me, f"cinic10_resnet152-000{n}").setting("train.precision") for n in (1, 2)] == ["fp32", "bf16"]

    me.types(gpus)
    assert (me.home / "logbook" / "two-gpus" / "logbook.md").is_file()
    assert [facts(me, f"cinic10_resnet152-000{n}").setting("strategy.name") for n in (3, 4)] == ["dp", "ddp"]
    assert facts(me, "cinic10_resnet152-0004").started("world_size") == 2

    other.types(line for line in amp if "prepare" in line)
    two_machines(nodes, [me, other])
    assert facts(me, "cinic10_resnet152-0005").started("world_size") == 2
    assert read_events(RunDir(me.home / "runs" / "cinic10_resnet152-0005"), "ended")[-1]["state"] == "COMPLETED"


@pytest.mark.long
def test_imagenet_trains_on_one_machine(student: Callable[..., Student]) -> None:
    me = student("me", "imagenet")
    (lines,) = readme.blocks("laptop", readme.RECIPES, "ImageNet from random weights on one node and on two")
    me.types(lines)
    run = facts(me, "imagenet_resnet50-0001")
    assert run.test is not None
    assert (run.setting("train.precision"), run.setting("schedule.name")) == ("o2", "onecycle")


@pytest.mark.long
def test_fashion_mnist_trains_on_the_cpu_and_on_what_there_is(student: Callable[..., Student]) -> None:
    me = student("me", "fashion_mnist")
    for lines in readme.blocks("laptop", readme.RECIPES, FASHION):
        me.types(lines)
    assert facts(me, "fashion_mnist-0001").setting("model.name") == "fashion_cnn"
    assert (me.home / "logbook" / "gpu" / "logbook.md").is_file()


@pytest.mark.long
def test_azures_job_trains_with_the_variables_that_azure_gives(student: Callable[..., Student]) -> None:
    me = student("me", "fashion_mnist")
    me.types(["python -m jobs.prepare fashion_mnist"])
    (text,) = re.findall(r"```yaml\n(# job\.yml\n.*?)```", readme.RECIPES.read_text("utf-8"), re.DOTALL)
    job = yaml.safe_load(text)
    install, _, command = job["command"].partition(" && ")
    assert install == "pip install --quiet -e ."  # which CI does, with the README's first block
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
    (first,) = readme.blocks("laptop", readme.RECIPES, VIT_SECTION)
    me.types(f"{line} {local}" if "submit" in line else line for line in first)
    assert facts(me, "cifar10_vit-0001").started("world_size") == 4

    (nodes,) = readme.blocks("two machines", readme.RECIPES, VIT_SECTION)
    other.types(line for line in first if "prepare" in line)
    for strategy, run in (("fsdp", "cifar10_vit-0002"), ("ddp", "cifar10_vit-0003")):
        here = [line.replace("s3://my-bucket/vit", bucket).replace("=fsdp", f"={strategy}") for line in nodes]
        two_machines([f"{line} {local}" for line in here], [me, other])
        assert facts(me, run).setting("strategy.name") == strategy

    # On a cluster, whose runs have these names, see tests/slurm/test_recipes.py.
    renamed = {"cifar10_vit-0001": "cifar10_vit-0002", "cifar10_vit-0002": "cifar10_vit-0003"}
    (report, evaluate) = readme.blocks("after the jobs", readme.RECIPES, VIT_SECTION)[0]
    me.types([re.sub("|".join(renamed), lambda found: renamed[found[0]], report)])
    said = me.types([evaluate.replace("s3://my-bucket/vit/cifar10_vit-0001", f"{bucket}/cifar10_vit-0002")])
    tested = facts(me, "cifar10_vit-0002").test
    assert tested is not None
    assert f"{tested['acc1']:.2f}" in said, "the weights in the bucket are the best ones"
    book = (me.home / "logbook" / "logbook.md").read_text()
    for asked in ("val, best checkpoint", "test, best checkpoint", "training time", "peak memory", "utilisation",
                  "batch size", "speed-up", bucket):  # fmt: skip
        assert asked in book, asked


@pytest.mark.long
def test_five_seeds_of_the_fast_recipe_become_one_table(student: Callable[..., Student]) -> None:
    me = student("me", "cifar10")
    (lines,) = readme.blocks("laptop", readme.RECIPES, "CIFAR-10 to 94 % as fast as the GPU can")
    said = me.types(lines)
    assert len(list((me.home / "runs" / "cifar10_fast-0001").glob("[0-4]/summary.json"))) == 5
    assert re.search("test acc1", said)
