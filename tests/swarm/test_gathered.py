"""What peers tell their group, from honest ones and from others."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from trainkit.swarm.exchange import NODE, read_gathered


def plain(value: Any) -> bytes:
    """As hivemind's serializer packs it, which is not imported here: that changes how a process starts others."""
    return bytes(msgpack.packb(value, use_bin_type=True, strict_types=True, default=as_tuple))


def as_tuple(value: Any) -> Any:
    return msgpack.ExtType(0x40, plain(list(value)))


def packed(*, bandwidth: Any = None, mode: Any = 1, **about: Any) -> bytes:
    return plain([bandwidth, mode, plain(about)])


def test_what_a_peer_of_ours_sends_is_read() -> None:
    found = read_gathered(packed(bandwidth=5.0, mode=0, rate=12.5, shares=True, probe=b"\0" * 1024, later="field"))
    assert found is not None
    assert (found.bandwidth, found.mode, found.about.rate) == (5.0, NODE, 12.5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1garbage",
        plain(None),
        plain([None, 1]),
        plain([None, 1, b"\xc1"]),
        plain([None, 1, "text"]),
        plain([None, 1, plain([1, 2])]),
        packed(mode=7),
        packed(bandwidth="fast"),
        packed(bandwidth=-1.0),
        packed(bandwidth=float("nan")),
        packed(bandwidth=float("inf")),
        packed(rate=float("inf")),
        packed(rate=1e300),
        packed(rate=-1.0),
        packed(rate="12"),
        packed(shares="yes"),
        packed(probe=b"\0" * 1025),
        packed(padding="x" * 5000),
        packed(rate=(1.0, 2.0)),  # an object of hivemind's own
        b"\x91" * 4000,  # lists in lists
        msgpack.packb([None, 1, msgpack.packb({"rate": msgpack.ExtType(0x50, b"\x00")})]),
    ],
)
def test_everything_else_is_nothing_and_raises_nothing(data: bytes) -> None:
    assert read_gathered(data) is None
