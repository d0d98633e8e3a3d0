"""Judgement of the report of a check: which nodes are to blame."""

import copy
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainkit.cluster import node_health
from trainkit.cluster.node_health import bad_nodes, findings, table

Report = dict[str, Any]
FAST = {"gb_s": 10.0}


def a_report(*nodes: str) -> Report:
    """Make the report of good nodes, one rank on each."""
    facts = {
        "host": "h", "versions": {"python": "3.11.7", "torch": "2.6.0"}, "cpus": 8,
        "memory_free_mb": 50_000, "memory_total_mb": 64_000,
        "disks": [{"path": "/scratch", "free_mb": 100_000, "free_inodes": 10**6}],
        "gpus": [{"index": 0, "name": "A100", "driver": "550.54", "ecc_errors": 0, "memory_used_mb": 4,
                  "memory_total_mb": 81_920, "processes": [], "pcie_width": 16, "pcie_width_max": 16}],
    }  # fmt: skip
    ranks = range(len(nodes))
    return {
        "ranks": {str(rank): copy.deepcopy(facts) | {"node": nodes[rank], "local_rank": 0} for rank in ranks},
        "missing": {},
        "clocks": {str(rank): 0.001 * rank for rank in ranks},
        "found": {str(rank): {"checksum": 7, "wrong": 0, "unsteady": False, "device": "A100"} for rank in ranks},
        "pairs": [{"ranks": [a, b], **FAST} for a in ranks for b in ranks if a < b],
    }


def _set(report: Report, rank: int, **facts: Any) -> None:
    report["ranks"][str(rank)].update(facts)


def _gpu(report: Report, rank: int, **facts: Any) -> None:
    report["ranks"][str(rank)]["gpus"][0].update(facts)


def test_good_nodes_have_no_findings() -> None:
    report = a_report("n1", "n2", "n3")
    assert findings(report) == []
    assert table(report, [])[-1] == "All good."


@pytest.mark.parametrize(
    ("spoil", "check", "words"),
    [
        (lambda r: r["missing"].update({"3": "n2"}), "answer", "did not answer"),
        (lambda r: r["found"].pop("1"), "answer", "then disappeared"),
        (lambda r: _set(r, 1, disks=[{"path": "/x", "free_mb": 3}]), "disk", "/x: 3 MB free"),
        (lambda r: _set(r, 1, disks=[{"path": "/x", "free_mb": 9000, "free_inodes": 2}]), "disk", "2 inodes"),
        (lambda r: _set(r, 1, memory_free_mb=100), "memory", "100 MB of 64000 free"),
        (lambda r: _set(r, 1, gpus=[]), "GPUs", "none, and n1 has 1 x A100 (driver 550.54)"),
        (lambda r: _gpu(r, 1, error="GPU is lost"), "GPUs", "GPU 0: GPU is lost"),
        (lambda r: _gpu(r, 1, ecc_errors=3), "ECC", "3 uncorrected"),
        (lambda r: _gpu(r, 1, remap_failed=True), "ECC", "memory rows"),
        (lambda r: _gpu(r, 1, processes=[4711]), "processes", "pid 4711"),
        (lambda r: _gpu(r, 1, memory_used_mb=9000), "memory", "9000 MB are in use"),
        (lambda r: _set(r, 1, versions={"python": "3.11.7", "torch": "2.7.0"}), "versions", "torch 2.7.0, and n1 has"),
        (lambda r: r["clocks"].update({"1": 61.0}), "clock", "+61.0 s"),
        (lambda r: r["found"]["1"].update(wrong=2), "matmul", "rank 1 (A100): matrix products are wrong"),
        (lambda r: r["found"]["1"].update(unsteady=True), "matmul", "wrong"),
        (lambda r: r["found"]["1"].update(checksum=8), "matmul", "its checksum differs"),
        (lambda r: r["found"]["1"].update(inside={"error": "NCCL error"}), "all-reduce", "inside the node: NCCL error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a function's own differs between workers
)  # fmt: skip
def test_a_node_that_is_not_like_it_should_be_is_named(
    spoil: Callable[[Report], object], check: str, words: str
) -> None:
    report = a_report("n1", "n2", "n3")
    spoil(report)
    found = [item for item in findings(report) if item.check == check]
    assert [item.node for item in found] == ["n2"]
    assert words in found[0].what
    assert bad_nodes(findings(report)) == ["n2"]


@pytest.mark.parametrize(("here", "wrong"), [(0.0, "n2"), (5.0, "n1")])
def test_of_two_clocks_the_one_is_wrong_that_this_machine_does_not_share(here: float, wrong: str) -> None:
    report = a_report("n1", "n2")
    report["clocks"]["1"] = 5.0
    assert bad_nodes(findings(report, here)) == [wrong]


@pytest.mark.parametrize(
    ("nodes", "slow_ones", "named", "words"),
    [
        (4, {2: {"gb_s": 0.5}}, ["n3"], "n1 - n3: 0.500 GB/s"),  # what all slow links have in common
        (4, {1: {"gb_s": 0.5}, 2: {"gb_s": 0.5}}, ["n2", "n3"], ""),
        (2, {1: {"gb_s": 0.002}}, ["n1", "n2"], "a check of three nodes would tell"),  # nobody can tell
        (3, {1: {"gb_s": 0.0, "error": "Connection timed out"}}, ["n2"], "Connection timed out"),
    ],
)
def test_the_node_that_slow_or_broken_links_have_in_common_is_named(
    nodes: int, slow_ones: dict[int, dict[str, Any]], named: list[str], words: str
) -> None:
    report = a_report(*(f"n{number + 1}" for number in range(nodes)))
    for rank, speeds in slow_ones.items():
        for pair in report["pairs"]:
            pair.update(speeds if rank in pair["ranks"] else {})
    found = findings(report)
    assert bad_nodes(found) == named
    assert words in found[0].what


def test_the_table_says_the_verdict_of_every_node_and_what_to_do() -> None:
    report = a_report("n1", "n2")
    _set(report, 1, memory_free_mb=100)
    lines = table(report, findings(report))
    assert [line.split()[-1] for line in lines[1:3]] == ["ok", "BAD"]
    assert lines[-2:] == ["BAD  n2: memory: 100 MB of 64000 free", "Bad: n2. Exclude it with --exclude n2."]


class AmdSmiException(Exception):
    pass


def amdsmi(*, lost: int) -> Any:
    """AMD's library with two GPUs, as ROCm 6.4 tells of them; the driver has lost one."""

    def total(gpu: int, kind: int) -> int:
        if gpu == lost:
            raise AmdSmiException("the device is lost")
        return 65536 * 2**20

    smi: Any = ModuleType("amdsmi")
    smi.AmdSmiException, smi.AmdSmiMemoryType = AmdSmiException, SimpleNamespace(VRAM=0)
    smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric = SimpleNamespace(JUNCTION=1), SimpleNamespace(CURRENT=0)
    smi.amdsmi_init = smi.amdsmi_shut_down = lambda: None
    smi.amdsmi_get_processor_handles = lambda: [0, 1]
    smi.amdsmi_get_gpu_asic_info = lambda gpu: {"market_name": "AMD Instinct MI250X"}
    smi.amdsmi_get_gpu_driver_info = lambda gpu: {"driver_name": "amdgpu", "driver_version": "6.10.5"}
    smi.amdsmi_get_gpu_memory_usage = lambda gpu, kind: 10 * 2**20
    smi.amdsmi_get_gpu_memory_total = total
    smi.amdsmi_get_temp_metric = lambda gpu, kind, metric: 40
    smi.amdsmi_get_gpu_total_ecc_count = lambda gpu: {"correctable_count": 7, "uncorrectable_count": gpu}
    smi.amdsmi_get_gpu_process_list = lambda gpu: [
        {"pid": pid, "memory_usage": {"vram_mem": held}} for pid, held in ((11, 2**30), (12, 0))
    ]
    return smi


def test_gpus_by_amd_are_asked_by_their_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi(lost=1))
    common = {
        "name": "AMD Instinct MI250X", "driver": "6.10.5", "memory_used_mb": 10, "temperature_c": 40, "processes": [11],
    }  # fmt: skip
    first, second = node_health.gpu_facts()
    assert first == {"index": 0, "memory_total_mb": 65536, "ecc_errors": 0, **common}
    assert second == {"index": 1, "ecc_errors": 1, **common}, "what a GPU does not tell is left out"
    report = a_report("n1")
    _set(report, 0, gpus=[first, second])
    assert [item.check for item in findings(report)] == ["processes", "ECC", "processes"]
