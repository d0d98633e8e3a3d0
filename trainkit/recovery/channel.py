"""Channel between two keepers: lines that only those can write who know the run's secret.

Whoever connects is told a number, and answers with one of its own; the first sealed line proves the rest. Each line is
sealed for this connection, this direction and its place, so that none can be sent twice.
"""

import json
import secrets
import socket
from typing import Any

from trainkit.cluster.ranks import ForgedError, Secret

PATIENCE_SECONDS = 2.0
"""For a connection, for its first line, and for a message to leave."""
_LONGEST = 1 << 16
"""Bytes of a line; an error's words are the longest that is sent."""
_NUMBER = 32
"""Characters of a connection's number, in hex."""


class Channel:
    """One end of a connection that has been made."""

    def __init__(self, connection: socket.socket, secret: Secret, *, serves: bool) -> None:
        self._connection = connection
        self._secret = secret
        self._serves = serves
        self._own = secrets.token_hex(_NUMBER // 2)
        self._name = ""
        self._sent = 0
        self._received = 0
        self._rest = b""
        connection.settimeout(PATIENCE_SECONDS)
        connection.sendall(f"{self._own}\n".encode())

    @classmethod
    def to(cls, address: str, port: int, secret: Secret) -> "Channel":
        """Connect. Raises OSError if nobody listens there."""
        connection = socket.create_connection((address, port), timeout=PATIENCE_SECONDS)
        channel = cls(connection, secret, serves=False)
        try:
            while not channel._name:
                channel._read()
        except ForgedError as error:
            raise ConnectionError("a stranger listens there") from error
        return channel

    def fileno(self) -> int:
        """Descriptor, for a selector."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError if the other end has gone."""
        sealed = self._secret.seal(self._purpose(self._serves, self._sent), json.dumps(message).encode())
        self._sent += 1
        self._connection.sendall(sealed.hex().encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; waits for some bytes.

        Raises:
            OSError: the other end has gone.
            ForgedError: it does not know the secret.
        """
        found = []
        for line in self._read():
            try:
                sealed = bytes.fromhex(line.decode("ascii"))
                content = self._secret.unseal(self._purpose(not self._serves, self._received), sealed)
            except ValueError as error:
                raise ForgedError("line") from error
            self._received += 1
            found.append(json.loads(content))
        return found

    def _purpose(self, serves: bool, number: int) -> str:
        return f"keepers/{self._name}/{serves}/{number}"

    def _read(self) -> list[bytes]:
        """Read whole lines; the first of a connection is the other end's number."""
        content = self._connection.recv(_LONGEST)
        if not content:
            raise ConnectionResetError("the other end has gone")
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > _LONGEST:
            raise ForgedError("line")
        if lines and not self._name:
            numbers = [self._own, lines.pop(0)[:_NUMBER].decode("ascii", "replace")]
            if not self._serves:
                numbers.reverse()
            self._name = "/".join(numbers)
        return lines
