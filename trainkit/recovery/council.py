"""Council of the keepers of one run's ranks: it decides whether failed ranks start again in place, all at once.

It is a small process beside rank 0, and ends with it. Each keeper tells it how its rank has ended. An error of the
program is left to the launcher, as is everything that the budget of `retries` forbids. Otherwise the council has the
other ranks ended at once, begins the next attempt, and tells all keepers where its ranks meet.
"""

import errno
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainkit.cluster.ranks import ForgedError, Secret
from trainkit.cluster.signals import KILLED, is_hang
from trainkit.common import fileio, terminal
from trainkit.common.errors import TrainkitError
from trainkit.common.hosts import free_port
from trainkit.diagnosis.rank_log import is_lost_connection
from trainkit.recovery.channel import PATIENCE_SECONDS, Channel
from trainkit.recovery.retries import HANGS_OF_A_BAD_NODE, LOST_NODE, budget_spent
from trainkit.run.events import Attempt
from trainkit.run.folder import LOST, NODES
from trainkit.run.history import history_of

NOTICE_SECONDS = 2.0
"""Time for the cause to show where a rank has only lost the connection to another."""
JOIN_SECONDS = 5.0
"""Time for keepers to join whose ranks have only begun when another one fails."""
END_SECONDS = 10.0
"""Time for the keepers to end ranks that were not the cause."""
SAVE_SECONDS = 60.0
"""The same once one of them has been told that its rank saves the state of the training."""
_GONE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH)
"""A process that ends closes its connection; a node without power does not."""
_LOOK_SECONDS = 0.1
_MOST_STRANGERS = 64
"""Connections that have not proved yet that they know the secret."""


@dataclass(frozen=True)
class Report:
    """End of a rank, as its keeper tells it."""

    rank: int
    error: str
    host: str

    @property
    def is_passing(self) -> bool:
        """It was killed, hangs, or is on a lost node: another start may mend that."""
        return self.error.startswith((KILLED, LOST_NODE)) or is_hang(self.error)


def cause(reports: Sequence[Report]) -> Report | None:
    """Find the report that says why the ranks have failed; None as long as all have only lost a connection.

    Args:
        reports: of ranks that have failed, in the order in which they came.
    """
    for report in reports:
        if not is_lost_connection(report.error):
            return report
    return None


def refusal(attempt: Attempt, found: Report, hosts: Iterable[str]) -> str:
    """Say why the ranks of an attempt are not started again in place; empty if they are.

    Args:
        found: its cause, which has been recorded.
        hosts: of all ranks.
    """
    if not (found.is_passing or is_lost_connection(found.error)):
        return "it is an error of the program"
    if attempt.successor() is not None:
        return "another attempt has taken over"
    hangs = [failure.host for failure in history_of(attempt.run).failures if is_hang(failure.error)]
    if hangs.count(found.host) >= HANGS_OF_A_BAD_NODE and len(set(hosts)) > 1:
        return f"ranks on {found.host} have hung before"
    return budget_spent(attempt.run)


class Council:
    """The council, in a process of its own."""

    def __init__(self, attempt: Attempt, size: int, job_id: str, secret: Secret) -> None:
        self._attempt = attempt
        self._first = attempt
        """The launcher's attempt."""
        self._can_replace = bool(fileio.read_object(attempt.run.plan).get("spare_nodes"))
        """The launcher has other nodes for the ranks of a lost one."""
        self._size = size
        self._job_id = job_id
        self._secret = secret
        self._members: dict[int, Channel] = {}
        self._hosts: dict[int, str] = {}
        """Hosts of all ranks."""
        self._strangers: dict[Channel, float] = {}
        """Connections that have not proved anything yet, and since when."""
        self._reports: list[Report] = []
        self._stuck: set[int] = set()
        """Ranks that have been in one computation for longer than their own pace allows."""
        self._failed_at = 0.0
        """When the first report on the attempt came."""
        self._end_until = 0.0
        """When ranks must have ended that were told to."""
        self._selector = selectors.DefaultSelector()
        self._is_over = False
        self._replaces = False
        """The launcher starts the ranks again on other nodes for those that are lost."""

    def serve(self, server: socket.socket) -> None:
        """Serve keepers until a failure is left to the launcher, or all of them have gone."""
        self._selector.register(server, selectors.EVENT_READ)
        had_members = False
        while not self._is_over and (self._members or not had_members):
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.fileobj is server:
                    self._accept(server)
                else:
                    self._hear(key.data)
            had_members = had_members or bool(self._members)
            self._forget_strangers()
            self._end_what_hangs()
            if self._is_due():
                self._decide(cause(self._reports) or self._reports[0])
        for channel in self._members.values():
            channel.close()

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        if len(self._strangers) >= _MOST_STRANGERS:
            connection.close()
            return
        with suppress(OSError):
            if self._can_replace:
                _ask_now_and_then(connection)
            channel = Channel(connection, self._secret, serves=True)
            self._strangers[channel] = time.monotonic()
            self._selector.register(channel, selectors.EVENT_READ, channel)

    def _forget_strangers(self) -> None:
        for channel, since in list(self._strangers.items()):
            if time.monotonic() - since > PATIENCE_SECONDS:
                self._drop(channel)

    def _drop(self, channel: Channel) -> list[int]:
        """Forget a connection. Returns the rank whose keeper it was."""
        self._selector.unregister(channel)
        channel.close()
        self._strangers.pop(channel, None)
        ranks = [rank for rank, member in self._members.items() if member is channel]
        for rank in ranks:
            del self._members[rank]
        return ranks

    def _messages(self, channel: Channel) -> list[dict[str, Any]]:
        """Messages that have come on a channel; one that has ended, or is a stranger's, is dropped."""
        try:
            return channel.receive()
        except (OSError, ForgedError) as error:
            for rank in self._drop(channel):
                if self._can_replace and getattr(error, "errno", None) in _GONE:
                    self._take(Report(rank, LOST_NODE, self._hosts[rank]))
            return []

    def _hear(self, channel: Channel) -> None:
        for message in self._messages(channel):
            if "join" in message:
                self._strangers.pop(channel, None)
                self._members[int(message["join"])] = channel
                self._hosts[int(message["join"])] = message["host"]
            elif message.get("attempt") == self._attempt.number:
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        """Take note of what a keeper says of its rank."""
        rank = message["rank"]
        if "error" in message:
            self._take(Report(rank, message["error"], message["host"]))
        elif message.get("stuck"):
            self._stuck.add(rank)
        else:
            self._stuck.discard(rank)

    def _end_what_hangs(self) -> None:
        """Tell all keepers if all ranks are stuck: else one may read data, validate or save, and the others wait.

        It is asked once all that has come is read: a rank may just have said that it goes on.
        """
        if len(self._stuck) == self._size:
            self._stuck.clear()
            self._tell({"hang": self._attempt.number})

    def _take(self, report: Report) -> None:
        if not self._reports:
            self._failed_at = time.monotonic()
        self._reports.append(report)

    def _is_due(self) -> bool:
        """True once it is known why ranks have failed, and all keepers have joined, or have had the time to."""
        if not self._reports:
            return False
        waited = time.monotonic() - self._failed_at
        found = cause(self._reports)
        if found is None:
            return waited > NOTICE_SECONDS
        return not found.is_passing or len(self._members) == self._size or waited > JOIN_SECONDS

    def _decide(self, found: Report) -> None:
        """Start the ranks again, or leave them to their launcher."""
        attempt = self._attempt
        found = self._recorded(found)
        why = refusal(attempt, found, self._hosts.values())
        if not why and len(self._members) < self._size and not self._can_replace:
            why = "not all keepers can be reached"
        if not why:
            why = self._start_again(found)
        if why:
            self._is_over = True
            self._tell({"over": why, "replaces": self._replaces})

    def _recorded(self, found: Report) -> Report:
        """Return a failure as it is on record: of a hang the rank that is behind, which others have found. One that the
        launcher would not start again for is left to it to record."""
        known = [item for item in history_of(self._attempt.run).failures if item.attempt == self._attempt.number]
        for item in known:
            if is_hang(item.error):
                rank = found.rank if item.rank is None else item.rank
                return Report(rank, item.error, item.host)
        is_new = all(item.rank != found.rank for item in known)
        if is_new and (found.is_passing or is_lost_connection(found.error)):
            self._attempt.failed(found.error, rank=found.rank, host=found.host)
        return found

    def _start_again(self, found: Report) -> str:
        """Have all ranks ended, and started as the next attempt. Returns why that was not possible; empty if it was."""
        left = self._left_after_end()
        if left and self._can_replace:
            self._leave(left)
        if len(self._members) < self._size:
            return "not all keepers can be reached"
        if left:
            return "not all ranks could be ended"
        before = self._attempt
        try:
            after = before.start_again(self._job_id)
        except (OSError, TrainkitError) as error:
            return f"the next attempt cannot be begun: {error}"
        nodes = NODES.read(before.logs)
        if nodes:
            NODES.send(after.logs, nodes, within=after.run.path)
        terminal.warn(
            f"Attempt {before.number}: rank {found.rank}: {found.error}; attempt {after.number} starts in place."
        )
        self._attempt = after
        self._reports = []
        self._stuck.clear()
        self._tell({"start": after.number, "port": free_port()})
        return ""

    def _left_after_end(self) -> set[int]:
        """Have the ranks ended. Returns those that may live on, for their keepers do not answer."""
        self._tell({"end": self._attempt.number})
        ended = {report.rank for report in self._reports if report.error != LOST_NODE}
        self._end_until = time.monotonic() + END_SECONDS
        while set(self._members) - ended and time.monotonic() < self._end_until:
            if len(self._members) < self._size and not self._can_replace:
                break
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if isinstance(key.data, Channel):
                    ended |= self._ended(key.data)
        return set(range(self._size)) - ended

    def _leave(self, ranks: set[int]) -> None:
        """Have the launcher wait no longer for the nodes of these ranks, and start the next attempt without them."""
        known = set()
        for item in history_of(self._attempt.run).failures:
            if item.error == LOST_NODE and item.attempt == self._attempt.number:
                known.add(item.host)
        lost: dict[str, int] = {}
        for rank in sorted(ranks & self._hosts.keys()):
            lost.setdefault(self._hosts[rank], rank)
        for host, rank in lost.items():
            if host not in known:
                self._attempt.failed(LOST_NODE, rank=rank, host=host)
        if lost:
            terminal.warn(f"Attempt {self._attempt.number}: no answer from {', '.join(lost)}.")
            self._replaces = True
            LOST.send(self._first.logs, ",".join(lost), within=self._attempt.run.path)

    def _ended(self, channel: Channel) -> set[int]:
        """Ranks of which a keeper says that they have ended."""
        found = set()
        for message in self._messages(channel):
            if message.get("attempt") != self._attempt.number:
                continue
            if "saves" in message:
                self._end_until = time.monotonic() + SAVE_SECONDS
            elif "error" in message:
                found.add(message["rank"])
        return found

    def _tell(self, message: dict[str, Any]) -> None:
        for channel in list(self._members.values()):
            try:
                channel.send(message)
            except OSError:
                self._drop(channel)


def _ask_now_and_then(connection: socket.socket) -> None:
    """Have the kernel ask the other one: it answers within 20 s, however busy its node is, or that is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
