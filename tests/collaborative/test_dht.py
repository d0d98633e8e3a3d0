from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("hivemind_here")


class Dead:
    """A node whose process has died: hivemind waits for its answers without limit."""

    peer_id = "QmDead"

    @property
    def client_mode(self) -> bool:
        raise AssertionError("asked a process that never answers")


@pytest.mark.parametrize("client_mode", [True, False])
def test_whether_a_peer_only_calls_out_is_known_without_its_nodes_process(client_mode: bool) -> None:
    """A job that ends sends SIGTERM to all processes of a peer: one that was joining waited for ever."""
    from trainkit.collaborative.dht import SwarmDHT

    identity: Any = SimpleNamespace(own=None, admission=None, subkey=b"", credential=b"")
    assert SwarmDHT(Dead(), identity, [], client_mode=client_mode).client_mode is client_mode
