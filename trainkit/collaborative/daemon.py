"""Where libp2p's daemon listens, and what a user can do when a node does not start."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from trainkit.collaborative import address, wall_clock
from trainkit.errors import RunFailedError, TrainkitError, UserError


def check_listening(host: str, port: int) -> None:
    """Refuse an address that is not this machine's, and a port that somebody else has.

    Tried here, because libp2p shares a port with whoever let others share it, such as another peer.
    """
    try:
        kind = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except (OSError, ValueError) as error:
        raise UserError(
            f"Cannot listen on {host}, port {port or 'any'}.",
            why=f"{getattr(error, 'strerror', None) or error}.",
            fix="Choose another --port, or a --host that is an IP address of this machine.",
        ) from None


def listen_on(host: str | None, port: int) -> str:
    if host is None:
        return "/ip4/127.0.0.1/tcp/0"  # libp2p insists on listening; nobody is told of it
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


def explain(error: Exception, peers: Sequence[str], *, invited: bool) -> TrainkitError:
    """What a user can do about a node that did not start."""
    text = str(error) or type(error).__name__
    if "local time must be within" in text or (peers and asyncio.run(wall_clock.is_off(peers))):
        return wall_clock.wrong_clock()
    if "already taken" in text:
        return UserError(
            "Another peer uses this identity now.",
            why="A peer is known by its key, so two cannot share one.",
            fix="Leave --identity out, or give every peer its own file.",
        )
    if peers:
        return address.nobody_answers(peers[0], invited=invited)
    return RunFailedError(
        "The peer-to-peer daemon of hivemind did not start.",
        why=f"{text.strip().splitlines()[-1][:200]}.",
        fix="On a loaded machine try again; else run with HIVEMIND_LOGLEVEL=DEBUG and see what it says.",
    )
