"""Lines between keepers: those that know the secret hear one another, and nobody else is heard."""

import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from threading import Thread

import pytest

from trainkit.cluster.ranks import ForgedError, Secret
from trainkit.recovery.channel import Channel

OURS = Secret("a secret of this run")
Pair = tuple[Channel, Channel]


def connect(client: Secret, server: Secret) -> Pair:
    """Both ends of a connection."""
    ends: list[Channel] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        dialling = Thread(target=lambda: ends.append(Channel.to("127.0.0.1", port, client)))
        dialling.start()
        serving = Channel(listening.accept()[0], server, serves=True)
        dialling.join()
    return ends[0], serving


@pytest.fixture
def pair() -> Iterator[Pair]:
    client, server = connect(OURS, OURS)
    with closing(client), closing(server):
        yield client, server


def heard(channel: Channel, count: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    while len(found) < count:
        found += channel.receive()
    return found


def test_messages_arrive_in_both_directions_in_their_order(pair: Pair) -> None:
    client, server = pair
    client.send({"join": 3})
    client.send({"rank": 3, "error": "ß" * 5000})
    assert heard(server, 2) == [{"join": 3}, {"rank": 3, "error": "ß" * 5000}]
    server.send({"start": 1, "port": 29500})
    assert heard(client, 1) == [{"start": 1, "port": 29500}]


def test_the_other_end_is_missed_once_it_has_gone(pair: Pair) -> None:
    client, server = pair
    client.close()
    with pytest.raises(ConnectionError):
        heard(server, 1)


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    client, server = connect(Secret("the secret of another"), OURS)
    with closing(client), closing(server):
        client.send({"join": 0})
        with pytest.raises(ForgedError):
            heard(server, 1)


def test_a_line_counts_once_and_only_on_its_own_connection(pair: Pair) -> None:
    client, server = pair
    sealed = OURS.seal(client._purpose(False, 0), b'{"join": 0}').hex().encode() + b"\n"
    client._connection.sendall(sealed)
    assert heard(server, 1) == [{"join": 0}]
    client._connection.sendall(sealed)
    with pytest.raises(ForgedError):
        heard(server, 1)
    other, serving = connect(OURS, OURS)
    with closing(other), closing(serving):
        other._connection.sendall(sealed)
        with pytest.raises(ForgedError):
            heard(serving, 1)


def test_a_line_without_an_end_is_given_up(pair: Pair) -> None:
    client, server = pair

    def flood() -> None:
        with suppress(OSError):  # nobody reads the rest
            for _ in range(64):
                client._connection.sendall(b"0" * 4096)

    flooding = Thread(target=flood)
    flooding.start()
    with pytest.raises(ForgedError):
        heard(server, 1)
    server.close()
    flooding.join()
