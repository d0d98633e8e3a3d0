"""Check one by one what this machine needs to join a swarm, without joining it."""

from __future__ import annotations

import itertools
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trainkit import terminal
from trainkit.config.schema import CollaborativeConfig
from trainkit.errors import TrainkitError
from trainkit.run.folder import runs_root
from trainkit.swarm import processes
from trainkit.swarm.address import MEGABIT, MOST_APART
from trainkit.swarm.admission import Entry
from trainkit.swarm.invitations import date
from trainkit.swarm.link import encoded_bytes, enough, in_words, load_for

_TCP_SECONDS = 5.0
# Checkpoints that a run keeps at a time (the best, the newest, the one on its way), of weights, momentum and model.
_BYTES_PER_PARAMETER = 4 * 3 * 4
_LEAST_FREE = 200 << 20


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    remedy: str = ""
    """What to do; empty if all is well, or nothing need be done."""
    exit_code: int = 0
    """2: this machine lacks it; 1: the swarm does."""

    def lines(self) -> list[str]:
        """For a terminal."""
        mark = "ok  " if self.exit_code == 0 else "FAIL"
        first = f"{mark}  {self.what:9}  {terminal.one_line(self.found)}"
        return [first, *([f"      fix: {terminal.one_line(self.remedy)}"] if self.remedy else [])]


def examine(entry: Entry, env: Mapping[str, str]) -> Iterator[Finding]:
    """Look at one thing after the other; what needs one that has failed is left out."""
    yield _device()
    if (disk := _disk(env, 0)).exit_code:
        yield disk
    if entry.invited:
        grant = entry.own.grant
        yield Finding("token", f"of {grant.name}, a {grant.role} of {grant.run}, good until {date(grant.expires)}")
    found = {item: list(_name_and_port(item)) for item in entry.addresses}
    reached = [item for item, findings in found.items() if not any(finding.exit_code for finding in findings)]
    for finding in itertools.chain(*found.values()):
        # One way in is enough: a peer has addresses of its own network, too, which lead nowhere from elsewhere.
        if reached and finding.exit_code:
            finding = replace(finding, remedy="", exit_code=0, found=f"{finding.found}; another address answers")
        yield finding
    if reached:
        yield from _swarm(replace(entry, addresses=tuple(reached)), env)


def _name_and_port(item: str) -> Iterator[Finding]:
    _, kind, host, _, port, *_ = item.split("/")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        fix = "Copy the address again; if it is right, look at this machine's name server (/etc/resolv.conf)."
        yield Finding("name", f"{host} is not known: {error.strerror}", fix, 2)
        return
    if kind.startswith("dns"):
        yield Finding("name", f"{host} is {found[0][4][0]}")
    place, began = f"{host} port {port}", time.monotonic()
    try:
        socket.create_connection((host, int(port)), timeout=_TCP_SECONDS).close()
    except TimeoutError:
        fix = "A firewall drops it: let this machine call out to that port, or the other one be called; or try another "
        yield Finding("tcp", f"{place} does not answer within {_TCP_SECONDS:.0f} s", f"{fix}address.", 1)
    except ConnectionRefusedError:
        fix = "Nothing listens there: the run is over or restarting. Ask its creator, or try another address."
        yield Finding("tcp", f"{place} refuses", fix, 1)
    except OSError as error:
        fix = "Look at this machine's network: `ip route get` that address."
        yield Finding("tcp", f"{place}: {error.strerror or error}", fix, 2)
    else:
        yield Finding("tcp", f"{place} answers in {1000 * (time.monotonic() - began):.0f} ms")


def _device() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("device", torch.cuda.get_device_name(0))
    fix = "" if not torch.version.cuda else "If this machine has a GPU, look at its driver: `nvidia-smi`."
    return Finding("device", "no GPU that torch can use; it would train on the CPU", fix)


def _disk(env: Mapping[str, str], parameters: int) -> Finding:
    root = runs_root(env)
    there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free, needed = shutil.disk_usage(there).free, max(_LEAST_FREE, parameters * _BYTES_PER_PARAMETER)
    found = f"{free / 1e9:.1f} GB free in {root}, and {needed / 1e9:.1f} GB may be needed"
    if free >= needed:
        return Finding("disk", found)
    return Finding("disk", found, "Free some space, or set TRAINKIT_RUNS to a folder with more.", 2)


def _swarm(entry: Entry, env: Mapping[str, str]) -> Iterator[Finding]:
    """What only a peer of the swarm can tell; this one calls out, reads and leaves."""
    try:
        processes.require_hivemind()
        from trainkit.swarm import access, session
        from trainkit.swarm.dht import open_dht, read_manifest
        from trainkit.swarm.spec import adapted

        with (
            access.identity(None, entry.own, entry.admission()) as identity,
            open_dht(identity, peers=entry.addresses) as dht,
        ):
            seen = dht.prove(entry.addresses, as_member=False)
            if seen.by:
                yield _clock(seen.clock)
            manifest = read_manifest(dht, entry.addresses)
            rounds = adapted(manifest.config, (), allow_code=True).collaborative
            uploaded = dht.upload(entry.addresses)
    except TrainkitError as error:
        name = "clock" if "clock" in error.what else "manifest" if "No run" in error.what else "swarm"
        yield Finding(name, f"{error.what} {error.why}", error.fix, 2 if error.exit_code == 3 or name == "clock" else 1)
        return
    end = (manifest.first_round + rounds.rounds) * rounds.round_seconds
    by_time = rounds.sync == "diloco"
    if manifest.stopped or (by_time and time.time() >= end):
        yield Finding("manifest", f"{manifest.name} is over", "Join another run.", 1)
        return
    left = f"{(end - time.time()) / 60:.0f} minutes to go" if by_time else f"a run of {rounds.rounds} updates"
    yield Finding("manifest", f"{manifest.name}, {left}")
    ours = session.installed()
    theirs = {name: version for name, version in manifest.facts.items() if name in ours and ours[name] != version}
    if theirs:
        wanted = " ".join(f"'{name}=={version}.*'" for name, version in theirs.items())
        yield Finding("versions", f"the creator has {session.in_words(theirs)}", f"pip install {wanted}", 2)
    else:
        yield Finding("versions", "those of the creator")
    parameters = session.parameters_in(manifest.facts)
    yield _disk(env, parameters)
    yield _upload(uploaded, parameters, rounds)


def _upload(rate: float, parameters: int, rounds: CollaborativeConfig) -> Finding:
    """What was sent went to a peer of the swarm: an exchange can have as much."""
    if rate <= 0.0:
        fix = "Try again; if it stays so, the peer there is overloaded, or has another version: ask its creator."
        return Finding("upload", "nobody takes what is sent to measure it", fix, 1)
    found = f"{rate / MEGABIT:.1f} Mbit/s"
    if rounds.sync == "gradients":
        size = encoded_bytes(parameters, rounds.compression)
        return Finding("upload", f"{found}: the {size / 1e6:.1f} MB of an update take {size / rate:.1f} s")
    if rate >= enough(parameters, rounds.compression, rounds.round_seconds):
        return Finding("upload", f"{found} at least, and the run needs less")
    load = load_for(rate, parameters, rounds.compression, rounds.round_seconds)
    found = in_words(load, rate).removeprefix("upload ")
    return Finding("upload", found, "It can join as it is. A wire instead of Wi-Fi may help.")


def _clock(ahead: float) -> Finding:
    found = f"{abs(ahead):.1f} s {'behind' if ahead > 0 else 'ahead of'} the swarm's"
    if abs(ahead) <= MOST_APART:
        return Finding("clock", found)
    return Finding("clock", found, "Set it: `timedatectl set-ntp true`, or ask the administrator.", 2)
