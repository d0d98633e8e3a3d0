"""What configs/recipes/README.md tells a student to type is typed here, and gives what the assignment asks for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import readme
from tests.recipes.student import Student, together
from trainkit.ranks.rendezvous import free_port
from trainkit.records.events import read_events
from trainkit.records.rundir import RunDir
from trainkit.report.facts import Facts

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
    """Makes a student who has fetched the archives of a data set into the folder ``data``, or another one."""

    def make(name: str, *data_sets: str, data: str = "data") -> Student:
        made = Student(tmp_path / name)
        (made.home / data).mkdir(parents=True, exist_ok=True)
        for data_set in data_sets:
            for file in fetched[data_set]:
                shutil.copy(file, made.home / data)
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
