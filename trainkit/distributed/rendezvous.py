"""Rendezvous: a store that rank 0 serves, and that only takes the word of who knows the run's secret."""

import ctypes
import errno
import ipaddress
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta

import psutil
import torch.distributed as c10d
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from trainkit.cluster.ranks import VARIABLE, ForgedError, RankEnv, Secret, address_towards, head_address
from trainkit.common import terminal
from trainkit.common.accelerators import interface_variables
from trainkit.common.errors import RefusedError, RunFailedError
from trainkit.common.process import is_set, set_variables

HEAD = "head"
"""Key at which other nodes write the head node's address, as they reach it: it may not know that itself."""


@contextmanager
def interfaces_set(env: RankEnv, store: Store, *, named: str | None = None) -> Iterator[None]:
    """Set what backends take their network interface from, while process groups are made; what the user has set
    stays.

    Left alone, gloo listens at the address that the machine's own name has on that machine, which Debian makes
    127.0.1.1, and which may be in a network that the others are not in.

    Args:
        store: where the ranks have met; one of another node has, if there is one.
        named: the site's own choice, else that of the route to the head node.

    Raises:
        RefusedError: this node has no such interface.
    """
    names = [name for _, name in socket.if_nameindex()]
    if env.on_one_machine:  # where no other machine listens
        chosen = min({"lo", "lo0"}.intersection(names), default=None)
    else:
        if named and named not in names:
            what = f"{socket.gethostname()} has no network interface '{named}'."
            why = f"launch.interface names it, and there are: {', '.join(names)}."
            fix = "Correct launch.interface in the site's profile; null takes that of the route to the head node."
            raise RefusedError(what, why=why, fix=fix)
        chosen = named or _towards_head(env, store)
    found = list(interface_variables(chosen).items()) if chosen else []
    if env.on_one_machine:
        found = found[:1]  # gloo's alone: GPUs of one machine do without a network
    ours = {variable: value for variable, value in found if not is_set(variable)}
    set_variables(ours)
    try:
        yield
    finally:
        set_variables(dict.fromkeys(ours))


def _towards_head(env: RankEnv, store: Store) -> str | None:
    """The interface that has the address by which this node and the head node reach each other."""
    if env.node_rank == 0:
        address = None
        if store.check([HEAD]):
            address = store.get(HEAD).decode()
    else:
        address = address_towards(env.master_addr)
    for name, addresses in psutil.net_if_addrs().items():
        if address in [each.address.split("%")[0] for each in addresses]:
            return name
    return None  # behind a translated address, as clouds give; gloo's own choice


_ERRORS = (c10d.DistNetworkError, c10d.DistStoreError)
_SHORTEST_PAUSE = 0.01
_LONGEST_PAUSE = 0.1
"""Seconds between two tries to reach rank 0: a thousand ranks make ten thousand a second, which it refuses for free."""
_PATIENCE_SECONDS = 5.0
"""For one of them, where a firewall is silent."""
_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>; Python's socket module does not have it


class SealedStore(Store):
    """A store whose names and values only those can make who know the secret.

    torch's own store hands everybody who connects the list of its keys, and lets them write any of them. Here a name
    says nothing to a stranger, and a value that one has put in its place is an error and not a value.
    """

    def __init__(self, store: Store, secret: Secret) -> None:
        super().__init__()
        self._store = store
        self._secret = secret

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._secret.name(key), self._secret.seal(key, content))  # type: ignore[arg-type]  # takes bytes

    def get(self, key: str) -> bytes:
        """Read a value; waits for it."""
        try:
            return self._secret.unseal(key, self._store.get(self._secret.name(key)))
        except ForgedError:
            what = "Somebody who does not know the run's secret has written into the place where its ranks meet."
            why = f"What '{key}' holds was not written by a rank of this run."
            fix = "Start the run again, on a port and in a network that strangers do not reach."
            raise RunFailedError(what, why=why, fix=fix) from None

    def add(self, key: str, amount: int) -> int:
        """Count. Only torch's barriers do: a number carries no mark, and a wrong one can but make them wait."""
        return int(self._store.add(self._secret.name(key), amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of ``keys`` are there."""
        return bool(self._store.check([self._secret.name(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of ``keys`` are there."""
        limit = () if timeout is None else (timeout,)
        self._store.wait([self._secret.name(key) for key in keys], *limit)

    def delete_key(self, key: str) -> bool:
        """Take a value away."""
        return bool(self._store.delete_key(self._secret.name(key)))

    deleteKey = delete_key  # torch looks for its own name

    def set_timeout(self, timeout: timedelta) -> None:
        """Longest wait where nothing else is said."""
        self._store.set_timeout(timeout)

    def clone(self) -> Store:
        """Another hand on the same store."""
        return self


def meet(env: RankEnv, secret: Secret, timeout: timedelta, *, wait_for_all: bool = True) -> SealedStore:
    """A store that the ranks have reached: rank 0 serves it, on loopback if they are all on its machine.

    Nothing in it is looked at that was not written by one who knows ``secret``. Once every rank is there, the port
    takes no further connection.

    Args:
        timeout: longest wait for the others.
        wait_for_all: return only once every rank is there.

    Raises:
        RunFailedError: ranks are missing when the time is over; it names them and their hosts, and those that came with
            another secret.
    """
    if env.is_main and not secret and not env.on_one_machine:
        terminal.warn(
            f"Warning: whoever reaches port {env.master_port} of {env.master_addr} can take part in this run as one of "
            f"its ranks. Set {VARIABLE} to the same long random text on every node."
        )
    host = "127.0.0.1" if env.on_one_machine else env.master_addr
    open_to_all, listening = _open(env, host, timeout)
    open_to_all.set_timeout(timeout)
    store = SealedStore(open_to_all, secret)
    with listening or nullcontext():
        if env.node_rank > 0 and env.local_rank == 0:
            address = head_address(env.master_addr)
            if address:
                store.set(HEAD, address)
        store.set(f"joined/{env.rank}", socket.gethostname())
        # Not sealed, and after the word that is: whoever is here and has not joined has another secret.
        open_to_all.set(_here(env.rank), socket.gethostname())
        if wait_for_all:
            _wait_for_all(store, open_to_all, env, host, timeout)
            if listening is not None:
                _take_no_more(listening)
    return store


def _take_no_more(listening: socket.socket) -> None:
    """Every rank has its connection: whoever comes now is a stranger, who could fill rank 0's memory with values.

    A filter that drops all packets to the listening socket alone. ``shutdown`` would end it as well, but libuv, by
    which torch serves the store, then turns in circles. Other systems than Linux go on listening.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of the packet
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    with suppress(OSError):
        if sys.platform == "linux":
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _open(env: RankEnv, host: str, timeout: timedelta) -> tuple[Store, socket.socket | None]:
    """The store, and on rank 0 another handle on the socket by which it is served."""
    try:
        if env.launcher == "torchrun":
            # torchrun's agent already serves the store at MASTER_PORT; torch knows whether and under which prefix.
            store, _, _ = next(rendezvous("env://", env.rank, env.world_size, timeout=timeout))
            return store, None
        if not env.is_main:
            _await_head(host, env.master_port, timeout)
            return TCPStore(host, env.master_port, is_master=False, timeout=timeout, wait_for_workers=False), None
        with _listen(host, env.master_port, only_here=env.on_one_machine) as listening:
            own = listening.getsockname()[0]
            second = listening.dup()
            reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(own, own)
            store = TCPStore(
                reached, env.master_port, is_master=True, timeout=timeout, wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )  # fmt: skip
            return store, second
    except (*_ERRORS, OSError) as error:
        here = socket.gethostname()
        place = f"{host}:{env.master_port}"
        what = f"Rank {env.rank} on {here} did not reach rank 0 at {place} within {timeout.total_seconds():.0f} s."
        why = "Rank 0 never started, runs elsewhere, or a firewall is between the nodes."
        fix = f"See rank 0's log, and check that {host} resolves and answers from {here}."
        if env.is_main:
            what = f"Rank 0 cannot open {place} for the other ranks."
            why = str(error).splitlines()[0]
            fix = "Free that port or set another MASTER_PORT; MASTER_ADDR must be an address of this machine."
        raise RunFailedError(what, why=why, fix=fix) from None


def _await_head(host: str, port: int, timeout: timedelta) -> None:
    """Return once rank 0 listens, or after ``timeout``. torch's own client sleeps up to a second between two tries."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause = _SHORTEST_PAUSE
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=_PATIENCE_SECONDS):
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _listen(host: str, port: int, *, only_here: bool) -> socket.socket:
    """A socket for the others, on the one address of this machine that they use, where there is just one."""
    usable = set()
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        own = str(address[0])
        # Debian gives a machine's own name 127.0.1.1, and only the other machines know its address.
        if only_here or not ipaddress.ip_address(own.split("%")[0]).is_loopback:
            usable.add((family, own))
    if only_here or len(usable) == 1:
        family, own = usable.pop()
        try:
            return socket.create_server((own, port), family=family, backlog=4096)
        except OSError as error:
            if only_here or error.errno != errno.EADDRNOTAVAIL:  # else behind a translated address, as clouds give
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def _wait_for_all(store: SealedStore, open_to_all: Store, env: RankEnv, host: str, timeout: timedelta) -> None:
    head = f"{host}:{env.master_port}"
    ranks = range(env.world_size)
    keys = [f"joined/{rank}" for rank in ranks]
    with suppress(*_ERRORS):
        store.wait(keys, timeout)
        for key in keys:
            store.get(key)  # raises where a stranger has written over it
        return
    try:
        missing = [rank for rank in ranks if not store.check([f"joined/{rank}"])]
        strangers = _with_another_secret(store, open_to_all, missing)
    except _ERRORS:
        what = f"Rank 0 at {head} went away while rank {env.rank} waited for the others."
        fix = "Its log says why, and which ranks were missing."
        raise RunFailedError(what, why="It gave up waiting, or died.", fix=fix) from None
    what = f"{len(missing)} of {env.world_size} ranks did not join within {timeout.total_seconds():.0f} s: "
    what += ", ".join(f"rank {rank}{_on_host(rank, env)}" for rank in missing)
    why = strangers or f"They never started, died while starting, or cannot reach {head}."
    fix = "See their logs; exclude a bad node with --exclude."
    if strangers:
        fix = f"Give every node the same {VARIABLE}, or --secret-file of `python -m jobs.launch`."
    raise RunFailedError(f"{what}.", why=why, fix=fix)


def _with_another_secret(store: SealedStore, open_to_all: Store, ranks: Sequence[int]) -> str:
    """Ranks that are there and have not joined, in words. Anybody may have written that; so it is only shown."""
    found = []
    for rank in ranks:
        if not store.check([f"joined/{rank}"]) and open_to_all.check([_here(rank)]):
            name = re.sub(r"[^A-Za-z0-9._-]", "?", open_to_all.get(_here(rank))[:64].decode("ascii", "replace"))
            found.append(f"rank {rank} on {name}")
    if not found:
        return ""
    verb = "is" if len(found) == 1 else "are"
    return f"{', '.join(found)} {verb} there, with another secret."


def _here(rank: int) -> str:
    return f"trainkit/here/{rank}"


def _on_host(rank: int, env: RankEnv) -> str:
    node = rank // max(1, env.local_world_size)
    if node < len(env.hosts):
        return f" on {env.hosts[node]}"
    return f" on node {node}" if env.num_nodes > 1 else ""
