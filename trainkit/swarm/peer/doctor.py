"""Examination of a machine: what keeps it from joining a swarm, or how others would reach one that is created on it."""

import ipaddress
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil
import torch

from trainkit.common import terminal
from trainkit.common.errors import TrainkitError
from trainkit.distributed.device import accelerator, device_name
from trainkit.run.find import runs_root
from trainkit.swarm.identity.invitations import Entry, date
from trainkit.swarm.network import processes
from trainkit.swarm.network.wall_clock import MOST_APART, require_same_time

# Checkpoints that a run keeps at a time (the best, the newest, the one on its way), of weights, momentum and model.
_BYTES_PER_PARAMETER = 4 * 3 * 4
_LEAST_FREE = 200 << 20
_CONNECT_SECONDS = 5.0
# Measured with hivemind 1.1.12, two routers and a public peer.
_NO_RELAY = "libp2p's relay is not used: it takes 3 minutes to begin, and ends connections after 30"


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that `doctor` has looked at."""

    what: str
    found: str
    remedy: str = ""
    """Advice; empty if all is well, or nothing need be done."""
    exit_code: int = 0
    """2: this machine lacks it; 1: the swarm does."""

    def lines(self) -> list[str]:
        """Return the text for a terminal."""
        mark = "ok  " if self.exit_code == 0 else "FAIL"
        found = [f"{mark}  {self.what:9}  {terminal.one_line(self.found)}"]
        if self.remedy:
            found.append(f"      fix: {terminal.one_line(self.remedy)}")
        return found


def examine_for_creator(env: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Look at what this machine needs to create a swarm: above all, in which way others would reach it."""
    yield _device()
    yield _disk(env, 0)
    yield reach_of(item.address for items in psutil.net_if_addrs().values() for item in items)


def reach_of(own: Iterable[str]) -> DoctorFinding:
    """Return in which way others reach a creator on a machine with these addresses.

    Of IPv4: a router hands out public addresses of IPv6, and lets nobody in there either.
    """
    known = list[ipaddress.IPv4Address]()
    for item in own:
        with suppress(ValueError):
            known.append(ipaddress.IPv4Address(item))
    for ip in known:
        if ip.is_global:
            found = f"itself, at {ip}, if its firewall lets TCP port 4711 in: swarm create PRESET --port 4711"
            return DoctorFinding("reach", found)
    private = ", ".join(str(ip) for ip in known if not ip.is_loopback) or "none"
    create = terminal.command("swarm", "create", "hivemind", "--through", "HOST")
    fix = f"{create}, with any machine that others reach; on that machine, the line with `swarm anchor` that it prints."
    return DoctorFinding("reach", f"through an anchor: it has no public address (it has {private}); {_NO_RELAY}", fix)


def _device() -> DoctorFinding:
    device = accelerator()
    if device is not None:
        return DoctorFinding("device", device_name(torch.device(device.type, 0)))
    fix = "If this machine has a GPU, check its driver: `nvidia-smi`." if torch.version.cuda else ""
    return DoctorFinding("device", "no GPU that torch can use; it would train on the CPU", fix)


def examine(entry: Entry, env: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Look at all that this machine needs to join; what needs one that has failed is left out."""
    yield _device()
    disk = _disk(env, 0)
    if disk.exit_code:
        yield disk
    grant = entry.own.grant
    yield DoctorFinding("token", f"of {grant.name}, a {grant.role} of {grant.run}, good until {date(grant.expires)}")
    found = {item: _port(item) for item in entry.addresses}
    reached = tuple(item for item, finding in found.items() if not finding.exit_code)
    for finding in found.values():
        # One way in is enough: a peer has addresses of its own network, too, which lead nowhere from elsewhere.
        if reached and finding.exit_code:
            finding = replace(finding, remedy="", exit_code=0, found=f"{finding.found}; another address answers")
        yield finding
    if reached:
        yield from _swarm(replace(entry, addresses=reached), env)


def _port(item: str) -> DoctorFinding:
    _, _, host, _, port, *_ = item.split("/")
    began = time.monotonic()
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (socket.gaierror, UnicodeError) as error:  # of a name that is none
        fix = "Copy the address again; if it is right, check this machine's name server (/etc/resolv.conf)."
        return DoctorFinding("name", f"{host} does not resolve: {getattr(error, 'strerror', error)}", fix, 2)
    except OSError as error:
        fix = "The run is over or restarting, or a firewall blocks it. Ask its creator, or try another address."
        return DoctorFinding("tcp", f"{host} port {port}: {error.strerror or error}", fix, 1)
    return DoctorFinding("tcp", f"{host} port {port} answers in {1000 * (time.monotonic() - began):.0f} ms")


def _disk(env: Mapping[str, str], parameters: int) -> DoctorFinding:
    root = runs_root(env)
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    needed = max(_LEAST_FREE, parameters * _BYTES_PER_PARAMETER)
    found = f"{free / 1e9:.1f} GB free in {root}, and {needed / 1e9:.1f} GB may be needed"
    fix = "" if free >= needed else "Free some space, or set TRAINKIT_RUNS to a folder with more."
    return DoctorFinding("disk", found, fix, 2 if fix else 0)


def _swarm(entry: Entry, env: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Look at what only a peer of the swarm can tell; this one calls out, reads and leaves."""
    what = "swarm"
    try:
        processes.require_hivemind()
        from trainkit.swarm.network import signed_records
        from trainkit.swarm.network.dht import open_dht, read_manifest
        from trainkit.swarm.peer import same_run
        from trainkit.swarm.protocol import messages

        with signed_records.identity(None, entry.own) as identity, open_dht(identity, peers=entry.addresses) as dht:
            if require_same_time(dht, entry.addresses):
                yield DoctorFinding("clock", f"within {MOST_APART:g} s of the swarm's")
            what = "manifest"
            _, manifest = read_manifest(dht, entry.addresses)
            rounds = same_run.adapted(manifest.config, (), allow_code=True).collaborative
            messages.require_going_on(manifest, rounds)
            yield DoctorFinding(what, f"{manifest.name}, a run of {rounds.rounds} rounds")
            what = "versions"
            ours = same_run.installed()
            theirs = {name: version for name, version in manifest.facts.items() if name in ours}
            why_not = same_run.untried(manifest, is_volunteer=entry.own.grant.role == "volunteer")
            other = same_run.require_same(theirs, ours, manifest, why_not)
            yield DoctorFinding(what, f"{other}: it counts after an audit" if other else "those of the creator")
            yield _disk(env, same_run.parameters_in(manifest.facts))
    except TrainkitError as error:
        if error.what.startswith("The clock"):
            what = "clock"
        exit_code = 2 if error.exit_code == 3 or what == "clock" else 1
        yield DoctorFinding(what, f"{error.what} {error.why}", error.fix, exit_code)
