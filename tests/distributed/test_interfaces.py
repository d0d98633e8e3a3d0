"""Over which network ranks talk."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace

import psutil
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.rank_functions import rank_env
from trainkit.distributed.meeting import HEAD, interfaces_set
from trainkit.errors import RefusedError
from trainkit.ranks.env import RankEnv

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
TWO_NODES = replace(
    rank_env(0, 2, 29500), num_nodes=2, local_world_size=1, local_rank=0, master_addr="head.example.org"
)


def _chosen(env: RankEnv, head: str | None = None, *, named: str | None = None) -> Mapping[str, str | None]:
    store = HashStore()
    if head is not None:
        store.set(HEAD, head)
    with interfaces_set(env, store, named=named):
        return {name: os.environ.get(name) for name in (GLOO, NCCL)}


def _own_network() -> tuple[str, str]:
    """An interface of this machine, and its address."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return name, each.address
    pytest.skip("this machine has loopback only")


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GLOO, NCCL):
        monkeypatch.delenv(name, raising=False)


def test_the_head_node_takes_the_interface_by_which_the_others_reach_it() -> None:
    name, address = _own_network()
    assert _chosen(TWO_NODES, head=address) == {GLOO: name, NCCL: f"={name}"}
    assert GLOO not in os.environ
    assert NCCL not in os.environ


def test_another_node_takes_the_interface_of_its_route_to_the_head_node() -> None:
    name, address = _own_network()
    other = replace(TWO_NODES, rank=1, node_rank=1, master_addr=address)
    assert _chosen(other) == {GLOO: name, NCCL: f"={name}"}


@pytest.mark.parametrize("head", [None, "203.0.113.7"])
def test_a_head_node_behind_a_translated_address_leaves_it_to_the_libraries(head: str | None) -> None:
    assert _chosen(TWO_NODES, head=head) == {GLOO: None, NCCL: None}


def test_the_site_may_name_the_interface() -> None:
    name, _ = _own_network()
    assert _chosen(TWO_NODES, head="203.0.113.7", named=name) == {GLOO: name, NCCL: f"={name}"}


def test_an_interface_that_a_node_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(RefusedError, match="has no network interface 'ib7'") as caught:
        _chosen(TWO_NODES, named="ib7")
    assert "lo" in caught.value.why


def test_what_the_user_has_set_stays_and_the_other_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    name, address = _own_network()
    monkeypatch.setenv(GLOO, "mine")
    assert _chosen(TWO_NODES, head=address) == {GLOO: "mine", NCCL: f"={name}"}
    assert os.environ[GLOO] == "mine"
