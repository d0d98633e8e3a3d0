"""Facts about a site, and jobs that are refused for them before they are queued."""

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.cluster.site import ComputeNode, Partition, Site, count_gpus
from trainkit.cluster.survey import discover, local_gpus, visible_gpus
from trainkit.common.errors import RefusedError
from trainkit.config.loading import Loaded, load
from trainkit.launch.validation import doubtful, require_room, require_shared

RECORDED = yaml.safe_load(Path(__file__).with_name("recorded").joinpath("22.05.8.yaml").read_text())


def test_gpus_are_counted_in_generic_resources() -> None:
    counts = {
        "gpu:4": 4, "gpu": 1, "gpu:a100:8": 8, "gpu:a100:4(S:0-1)": 4, "(null)": 0, "nvme:2": 0, "": 0,
        "gpu:a100:2(S:0),gpu:t4:1(S:1),nvme:1": 3,
    }  # fmt: skip
    assert {gres: count_gpus(gres) for gres in counts} == counts


def test_gpus_of_other_makers_are_counted_by_their_kernel_drivers(tmp_path: Path) -> None:
    assert local_gpus({}, tmp_path) == 0
    intel = {"card0": ("0x8086", "0x030000"), "card1": ("0x8086", "0x038000"), "card2": ("0x1a03", "0x038000")}
    for card, told in intel.items():  # a processor's own, one that computes, and a board's own
        (tmp_path / "sys/class/drm" / card / "device").mkdir(parents=True)
        for name, text in zip(("vendor", "class"), told, strict=True):
            (tmp_path / "sys/class/drm" / card / "device" / name).write_text(f"{text}\n")
    assert local_gpus({}, tmp_path) == 1
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node, gpu_id in enumerate(("0", "51766", "8182", "")):  # a processor, two GPUs, one of another job
        (nodes / str(node)).mkdir(parents=True)
        (nodes / str(node) / "gpu_id").write_text(gpu_id)
    assert local_gpus({}, tmp_path) == 2
    assert local_gpus({"HIP_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert local_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert local_gpus({"TRAINKIT_DEVICE": "npu:8"}, tmp_path) == 8
    assert local_gpus({"TRAINKIT_DEVICE": "npu:8", "CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 2


def test_the_visible_device_mask_is_counted_as_cuda_reads_it() -> None:
    counts = {
        (None, 4): 4, ("", 4): 0, ("0,1", 4): 2, ("5,6", 8): 2, ("5,6", 4): 0, ("0,-1,1", 4): 1, ("1,1", 4): 1,
        ("GPU-8932f937,GPU-11111111", 4): 2, ("0", 0): 0,
    }  # fmt: skip
    assert {asked: visible_gpus(*asked) for asked in counts} == counts


@pytest.mark.parametrize(
    ("scontrol", "is_slurm", "known", "unknown"),
    [
        (f"if [ $2 = node ]; then cat <<'E'\n{RECORDED['nodes']}\nE\nelse cat <<'E'\n{RECORDED['partitions']}\nE\nfi",
         True, ["main", "low", "high"], ""),
        ("echo 'slurm_load_node: Unable to contact slurm controller' >&2; exit 1", True, [], "Unable to contact"),
        ("echo 'fatal: Could not establish a configuration source' >&2; exit 1", False, [],
         "not configured for a cluster"),
    ],
    ids=["a login node", "no answer", "packages without a cluster"],
)  # fmt: skip
def test_a_login_node_tells_its_partitions_or_why_it_does_not(
    fake_command: Callable[[str, str], Path], scontrol: str, is_slurm: bool, known: list[str], unknown: str
) -> None:
    assert not discover({"PATH": "/no/sbatch"}).scheduler
    fake_command("sbatch", "exit 1")
    fake_command("scontrol", scontrol)
    site = discover(dict(os.environ))
    assert bool(site.scheduler) == is_slurm
    assert [partition.name for partition in site.partitions] == known
    by_name = [site.partition(name) for name in (None, "main", "nosuch")]
    assert [partition is not None for partition in by_name] == [bool(known), bool(known), False]
    assert unknown in site.unknown


# What is refused before a job is queued, although ``sbatch --test-only`` might take it.

TWO_NODES = Site("slurm", 0, 2, partitions=(Partition("main", (ComputeNode("n1", 8, 4), ComputeNode("n2", 8, 4))),))


def loaded(**flags: Any) -> Loaded:
    return load("ddp", flags={f"launch.{key}": (value, f"--{key}") for key, value in flags.items()})


# Folders


def test_a_folder_that_few_sites_share_is_doubtful_unless_there_is_one_node(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    require_shared(Path("/tmp/runs/x"), "The run folder", TWO_NODES, ())
    require_shared(tmp_path / "link" / "x", "The run folder", TWO_NODES, [str(tmp_path)])
    assert "few sites share /tmp" in doubtful(Path("/tmp/runs/x"), TWO_NODES, ())
    assert doubtful(Path("/tmp/runs/x"), TWO_NODES, ("/tmp",)) == ""
    assert doubtful(Path("/home/me/runs/x"), TWO_NODES, ()) == ""

    alone = Site(
        "slurm", 0, 2, partitions=(Partition("main", (ComputeNode(socket.gethostname().partition(".")[0], 8, 4),)),)
    )
    require_shared(Path("/dev/shm/x"), "The run folder", alone, ["/home"])
    assert doubtful(Path("/tmp/x"), alone, ()) == ""


@pytest.mark.parametrize(
    ("blocks", "files", "says"),
    [
        (10**6, (10**6, 10**6, 10**6), None),
        (10**6, (0, 0, 0), None),  # btrfs counts no files
        (10**6, (10**6, 20, 20), "20 more files (inodes) may be made there, and a run needs 1000"),
        (256, (10**6, 10**6, 10**6), "1 MB are free"),
    ],
)
def test_a_disk_without_space_or_without_inodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, files: tuple[int, int, int], says: str | None
) -> None:
    stat = os.statvfs_result((4096, 4096, 10**7, blocks, blocks, *files, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: stat)
    with pytest.raises(RefusedError) if says else nullcontext() as refused:
        require_room(tmp_path / "not" / "yet" / "there")
    assert refused is None or (says or "") in refused.value.why
