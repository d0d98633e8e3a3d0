"""Which network interface the ranks of several machines exchange tensors over.

gloo and NCCL take it from the environment. Left alone, gloo listens at the address that the machine's own name has on
that machine, which Debian makes 127.0.1.1, and which may be in a network that the others are not in.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]

from trainkit.errors import RefusedError
from trainkit.ranks.env import RankEnv
from trainkit.ranks.rendezvous import address_towards

HEAD = "head"
"""Where ranks of other nodes write the head node's address, as they reach it: it may not know that itself."""
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@contextmanager
def interfaces_set(env: RankEnv, store: Store, *, named: str | None = None) -> Iterator[None]:
    """Set both variables while process groups are made; what the user has set stays.

    Args:
        store: where the ranks have met; one of another node has, if there is one.
        named: the site's own choice, else that of the route to the head node.

    Raises:
        RefusedError: this node has no such interface.
    """
    if env.on_one_machine:  # where no other machine listens
        name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        found = {_GLOO: name}
    else:
        name = _require(named) if named else _towards_head(env, store)
        found = {_GLOO: name, _NCCL: name and f"={name}"}  # to NCCL eth0 is the beginning of a name, =eth0 all of it
    ours = {variable: value for variable, value in found.items() if value and variable not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for variable in ours:
            del os.environ[variable]


def _require(name: str) -> str:
    there = [other for _, other in socket.if_nameindex()]
    if name not in there:
        raise RefusedError(
            f"{socket.gethostname()} has no network interface '{name}'.",
            why=f"launch.interface names it, and there are: {', '.join(there)}.",
            fix="Correct launch.interface in the site's profile; null takes that of the route to the head node.",
        )
    return name


def _towards_head(env: RankEnv, store: Store) -> str | None:
    """The interface that has the address by which this node and the head node reach each other."""
    if env.node_rank == 0:
        address = store.get(HEAD).decode() if store.check([HEAD]) else None
    else:
        address = address_towards(env.master_addr)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == address for each in addresses):
            return name
    return None  # behind a translated address, as clouds give; gloo's own choice
