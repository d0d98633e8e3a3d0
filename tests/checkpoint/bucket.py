"""An S3 server on loopback that can be told to fail: refuse, stall, or cut connections in the middle."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Trouble:
    """What happens to connections from now on."""

    refuse: bool = False
    stall: bool = False
    cut_after: int | None = None
    """Bytes of a request after which its connection is cut."""
    connections: int = 0
    _open: list[socket.socket] = field(default_factory=list)

    def over(self) -> None:
        """All is well again."""
        self.refuse = self.stall = False
        self.cut_after = None


def _pump(source: socket.socket, target: socket.socket, trouble: Trouble, *, is_request: bool) -> None:
    passed = 0
    with suppress(OSError):
        while data := source.recv(1 << 16):
            while trouble.stall:
                time.sleep(0.02)
            passed += len(data)
            if is_request and trouble.cut_after is not None and passed > trouble.cut_after:
                break
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def _serve(listener: socket.socket, port: int, trouble: Trouble) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            trouble.connections += 1
            if trouble.refuse:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", port))
            for source, target, is_request in ((client, server, True), (server, client, False)):
                pump = threading.Thread(
                    target=_pump, args=(source, target, trouble), kwargs={"is_request": is_request}, daemon=True
                )
                pump.start()


@contextmanager
def troubled(port: int) -> Iterator[tuple[int, Trouble]]:
    """A port in front of ``port``, and what happens to those that come through it."""
    trouble = Trouble()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, port, trouble), daemon=True).start()
        yield listener.getsockname()[1], trouble
        trouble.over()
        listener.shutdown(socket.SHUT_RDWR)
