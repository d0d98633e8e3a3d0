"""Ranks meet where nobody else can take their place."""

import contextlib
import os
import pickle
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as c10d
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from tests.rank_functions import rank_env, run_ranks, train_run
from trainkit.cluster.ranks import NO_SECRET, RankEnv, Secret
from trainkit.common.errors import RefusedError, RunFailedError
from trainkit.common.hosts import free_port
from trainkit.distributed import rendezvous
from trainkit.distributed.process_group import distributed
from trainkit.distributed.rendezvous import HEAD, SealedStore, interfaces_set

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
OURS, THEIRS = Secret("correct horse battery staple"), Secret("another text of enough length")


# Among those who know the secret


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _meet_and_talk(env: RankEnv) -> tuple[list[bool], list[Any]]:
    """Return what answers before all have met; then by secret gloo's interface, if a late one is let in, and words."""
    # On Linux every 127.x.y.z is this machine. What listens on all interfaces answers there as well.
    store = rendezvous.meet(env, OURS, timedelta(seconds=60), wait_for_all=False)
    store.wait(["joined/0", "joined/1"])
    answers = [_answers(address, env.master_port) for address in ("127.0.0.1", "127.0.0.2")]
    store.set(f"looked/{env.rank}", "1")
    store.wait(["looked/0", "looked/1"])
    seen = []
    for number, secret in enumerate((OURS, NO_SECRET), start=1):
        later = replace(env, master_port=env.master_port + number)
        with distributed(later, use_gpu=False, secret=secret, timeout=timedelta(seconds=60)) as dist:
            late = sys.platform == "linux" and _answers("127.0.0.1", later.master_port)  # the packet filter is Linux's
            dist.barrier()
            c10d.new_group([0, 1])  # a second group, as a mesh makes it, which the ranks arrange over the store
            seen.append((os.environ.get(GLOO), late, dist.gather_json(f"rank {dist.rank}")))
    return answers, [*seen, os.environ.get(GLOO)]


def test_ranks_of_one_machine_meet_and_talk_on_loopback_only() -> None:
    """With a secret and without; nobody reaches their store once all have met."""
    lo = "lo" if "lo" in {name for _, name in socket.if_nameindex()} else None
    talked = (lo, False, ["rank 0", "rank 1"])
    assert run_ranks(2, _meet_and_talk) == [([True, False], [talked, talked, None])] * 2


def test_a_rank_that_came_first_is_there_as_soon_as_rank_0_is() -> None:
    """torch's own client sleeps for up to a second between two tries, and the longer it has waited the longer."""
    waits = []
    for _ in range(3):
        port = free_port()
        first, second = (rank_env(rank, 2, port) for rank in (0, 1))
        with ThreadPoolExecutor() as pool:
            came_first = pool.submit(rendezvous.meet, second, OURS, timedelta(seconds=60))
            time.sleep(1.5)
            opened = time.monotonic()
            place = rendezvous.meet(first, OURS, timedelta(seconds=60))
            waits.append(time.monotonic() - opened)
            assert came_first.result().get("joined/0") == place.get("joined/0")
    assert statistics.median(waits) < 0.25


def _with_a_secret_each(env: RankEnv) -> str:
    try:
        with distributed(env, use_gpu=False, secret=(OURS, THEIRS)[env.rank], timeout=timedelta(seconds=3)):
            return "joined"
    except RunFailedError as error:
        return str(error)


def test_a_rank_with_another_secret_is_named_and_does_not_join() -> None:
    first, second = run_ranks(2, _with_a_secret_each)
    assert "1 of 2 ranks did not join within 3 s: rank 1." in first
    assert f"rank 1 on {socket.gethostname()} is there, with another secret" in first
    assert "TRAINKIT_SECRET" in first
    assert "joined" not in (first, second)


# The store itself


def test_a_sealed_store_tells_a_lister_nothing_also_in_torchs_wrappers() -> None:
    plain = HashStore()
    sealed = SealedStore(plain, OURS)
    sealed.set("joined/1", "n1")
    assert SealedStore(plain, OURS).get("joined/1") == b"n1"
    for other in (THEIRS, NO_SECRET):
        assert not SealedStore(plain, other).check(["joined/1"])
    assert not plain.check(["joined/1"])
    plain.set(OURS.name("joined/1"), "n2")  # as a stranger may
    with pytest.raises(RunFailedError, match="does not know the run's secret"):
        SealedStore(plain, OURS).get("joined/1")
    wrapper: Any = PrefixStore("group", sealed)  # older stubs do not know `clone`
    inner = wrapper.clone()
    inner.set("key", "value")
    assert (inner.get("key"), inner.check(["key"]), inner.add("count", 3)) == (b"value", True, 3)
    assert inner.delete_key("key")
    assert not plain.check([OURS.name("group/key")])


# Where it listens


@pytest.mark.parametrize(
    ("addresses", "bound"),
    [
        (["127.0.0.2"], "::"),  # a name that is loopback on its own machine, as Debian has it
        (["203.0.113.9"], "::"),  # a public address that is translated before it reaches this machine
        (["HERE"], "HERE"),
        (["HERE", "fd00::77"], "::"),  # two: who knows by which the others come
    ],
)
def test_on_several_machines_rank_0_listens_on_the_head_nodes_own_address(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], bound: str
) -> None:
    _, here = own_network()
    found = [
        (socket.AF_INET6 if ":" in item else socket.AF_INET, socket.SOCK_STREAM, 6, "", (item.replace("HERE", here), 0))
        for item in addresses
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with rendezvous._listen("head", free_port(), only_here=False) as listening:
        assert listening.getsockname()[0] in (bound.replace("HERE", here), "0.0.0.0" if bound == "::" else "")


# Warned


def test_ranks_of_several_machines_without_a_secret_are_warned_once(capfd: pytest.CaptureFixture[str]) -> None:
    for num_nodes, secret, warned in ((2, NO_SECRET, 1), (2, OURS, 0), (1, NO_SECRET, 0)):
        env = replace(rank_env(0, 2, free_port()), num_nodes=num_nodes, local_world_size=2 // num_nodes)
        rendezvous.meet(replace(env, master_addr="0.0.0.0"), secret, timedelta(seconds=10), wait_for_all=False)
        said = capfd.readouterr().err
        assert said.count("TRAINKIT_SECRET") == len(said.splitlines()) == warned


# A stranger


class _Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self.file, "w")


# What torch and trainkit have used as keys, without a secret.
GUESSES = (
    "joined/0", "joined/1", "trainkit/here/0", "trainkit/here/1", "swarm", "0//cpu//0/0", "0//cpu//0/1",
    "default_pg/0//cpu//0/0", "default_pg/0//cpu//0/1", "0//1//cpu//0/1", "store_based_barrier_key:0", "worker_count",
)  # fmt: skip


def _connect(port: int) -> TCPStore:
    """A stranger's way to the store, as soon as rank 0 is there."""
    deadline = time.monotonic() + 60
    while True:
        try:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
            store.wait(["trainkit/here/0"])
            return store
        except (c10d.DistNetworkError, c10d.DistStoreError):
            assert time.monotonic() < deadline


def _pose_as_rank_1(port: int, folder: Path) -> None:
    """All that can be done without the secret short of breaking the store: for that there is a test of its own."""
    store, bomb = _connect(port), _Bomb(str(folder / "executed"))
    for view in (store, SealedStore(store, NO_SECRET)):
        view.set("joined/1", "n1")
        with contextlib.suppress(RuntimeError):  # rank 0 does not answer
            c10d.init_process_group("gloo", store=view, rank=1, world_size=2, timeout=timedelta(seconds=1))
            gather: Any = c10d.all_gather_object
            gather([None, None], bomb)
        if c10d.is_initialized():
            c10d.destroy_process_group()
    for prefix in {"", *(key.rpartition("/")[0] + "/" for key in _listed(store))}:
        for guess in GUESSES:
            store.set(prefix + guess, pickle.dumps(bomb))  # type: ignore[arg-type]  # takes bytes
            store.set(prefix + NO_SECRET.name(guess), NO_SECRET.seal(guess, pickle.dumps(bomb)))  # type: ignore[arg-type]


def _listed(store: TCPStore) -> list[str]:
    return list(store.list_keys()) if hasattr(store, "list_keys") else []


def _turn(env: RankEnv, folder: Path) -> bool:
    """Return True for a true rank; rank 1 waits for the stranger, who is rank 2."""
    over = folder / "over"
    if env.rank == 2:
        over.touch()
    while env.rank == 1 and not over.exists():
        time.sleep(0.02)
    return env.rank != 2


def _train_beside_a_stranger(env: RankEnv, folder: Path) -> str:
    if env.rank == 2:
        _pose_as_rank_1(env.master_port, folder)
    if not _turn(env, folder):
        return "stranger"
    return train_run(rank_env(env.rank, 2, env.master_port), folder / "run", "ddp", ("train.max_steps=2",), secret=OURS)


def test_a_stranger_who_poses_as_a_rank_runs_nothing_and_the_true_one_joins(tmp_path: Path) -> None:
    endings = run_ranks(3, _train_beside_a_stranger, tmp_path, timeout=120)
    assert not (tmp_path / "executed").exists()
    assert endings == ["finished", "finished", "stranger"]


def _meet_beside_a_vandal(env: RankEnv, folder: Path) -> str:
    if env.rank == 2:
        store, bomb = _connect(env.master_port), pickle.dumps(_Bomb(str(folder / "executed")))
        for key in _listed(store):
            store.set(key, bomb)  # type: ignore[arg-type]
    if not _turn(env, folder):
        return "vandal"
    try:
        with distributed(rank_env(env.rank, 2, env.master_port), use_gpu=False, secret=OURS) as dist:
            dist.barrier()
            return "met"
    except RunFailedError as error:
        return error.what


def test_a_stranger_who_writes_over_every_key_is_noticed_and_runs_nothing(tmp_path: Path) -> None:
    if not hasattr(TCPStore, "list_keys"):
        pytest.skip("this torch shows nobody the keys")
    first, second, _ = run_ranks(3, _meet_beside_a_vandal, tmp_path, timeout=120)
    noticed = "does not know the run's secret"
    assert noticed in first
    assert noticed in second or "went away" in second  # whoever looks first; rank 0 serves the store
    assert not (tmp_path / "executed").exists()


# Over which network they talk.

TWO_NODES = replace(rank_env(0, 2, 29500), num_nodes=2, local_world_size=1, local_rank=0, master_addr="head.example")


def _chosen(env: RankEnv, head: str | None = None, *, named: str | None = None) -> Mapping[str, str | None]:
    store = HashStore()
    if head is not None:
        store.set(HEAD, head)
    with interfaces_set(env, store, named=named):
        return {name: os.environ.get(name) for name in (GLOO, NCCL)}


def own_network() -> tuple[str, str]:
    """An interface of this machine, and its address."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return name, each.address
    pytest.skip("this machine has loopback only")


@pytest.mark.parametrize(
    ("chosen_by", "gloo"),
    [
        ("the others, who have reached it there", "OWN"),
        ("its route to the head node", "OWN"),
        ("the site", "OWN"),
        ("the user", "mine"),
        ("nobody: the address is translated", None),
    ],
)
def test_a_node_talks_over_the_interface_of_the_head_nodes_network(
    monkeypatch: pytest.MonkeyPatch, chosen_by: str, gloo: str | None
) -> None:
    for variable in (GLOO, NCCL):
        monkeypatch.delenv(variable, raising=False)
    if chosen_by == "the user":
        monkeypatch.setenv(GLOO, "mine")
    name, address = own_network()
    translated = chosen_by.startswith(("the site", "nobody"))
    if chosen_by.startswith("its route"):
        found = _chosen(replace(TWO_NODES, rank=1, node_rank=1, master_addr=address))
    else:
        head = "203.0.113.7" if translated else address
        found = _chosen(TWO_NODES, head=head, named=name if chosen_by == "the site" else None)
    assert found == {GLOO: name if gloo == "OWN" else gloo, NCCL: f"={name}" if gloo else None}
    assert os.environ.get(GLOO) == ("mine" if chosen_by == "the user" else None)
    assert NCCL not in os.environ


def test_an_interface_that_a_node_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(RefusedError, match="has no network interface 'ib7'") as caught:
        _chosen(TWO_NODES, named="ib7")
    assert "lo" in caught.value.why
