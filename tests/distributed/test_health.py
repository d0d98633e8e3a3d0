"""Measurements of the ranks of a check."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainkit.cluster.node_health import disk_facts, node_facts
from trainkit.cluster.ranks import Secret
from trainkit.common.errors import RunFailedError
from trainkit.distributed.health import _clocks, _pairs, matmul_check, rounds
from trainkit.distributed.rendezvous import SealedStore

CPU = torch.device("cpu")


def test_a_product_is_the_same_with_any_threads_and_a_wrong_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    good = matmul_check(CPU, size=200)
    torch.set_num_threads(threads + 1)
    try:
        assert matmul_check(CPU, size=200) == good
    finally:
        torch.set_num_threads(threads)
    assert (good["wrong"], good["unsteady"]) == (0, False)

    def off_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a @ b
        product[3, 5] += 1
        return product

    monkeypatch.setattr(torch, "matmul", off_by_one)
    bad = matmul_check(CPU, size=200)
    assert bad["wrong"] == 5
    assert good["checksum"] != bad["checksum"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_two_nodes_are_measured_once_and_never_two_pairs_at_a_time(count: int) -> None:
    pairs = [pair for each in rounds(count) for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for each in rounds(count):
        nodes = [node for pair in each for node in pair]
        assert len(set(nodes)) == len(nodes)
    assert rounds(1) == [], "one node waits for no other"


def test_who_ends_the_rounds_without_the_secret_is_noticed() -> None:
    secret, open_to_all = Secret("correct horse battery staple"), HashStore()
    open_to_all.set(secret.name("more/0"), "false")
    with pytest.raises(RunFailedError, match="does not know the run's secret"):
        _pairs(SealedStore(open_to_all, secret), 1, [[0], [2]], CPU)


def test_a_node_that_answers_late_has_no_wrong_clock_for_that() -> None:
    store, report = SealedStore(HashStore(), Secret("correct horse battery staple")), dict[str, Any]()
    busy = threading.Timer(0.5, _clocks, (store, 1, [[0], [1]], {}))
    busy.start()
    _clocks(store, 0, [[0], [1]], report)
    busy.join()
    assert report["clocks"] == {"0": 0.0, "1": 0.0}


def test_a_node_says_what_it_has_and_why_nobody_can_write_to_a_folder(tmp_path: Path) -> None:
    facts = json.loads(json.dumps(node_facts([tmp_path / "not" / "there"])))
    assert facts["memory_free_mb"] > 0
    assert facts["disks"][0]["path"] == str(tmp_path / "not" / "there")
    assert facts["disks"][0]["free_mb"] > 0
    assert facts["versions"]["torch"] == torch.__version__.split("+")[0]
    assert "error" in disk_facts(Path("/proc/self"))
