"""A creator's own: where else it answers, and the account of who has contributed how much.

Credit is counted from what was averaged, after the screen; claims are worth nothing.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.run.contributions import Contribution, Contributions
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.swarm.identity.bans import Bans
from trainkit.swarm.peer.place import Hooks, PeerSpec
from trainkit.swarm.peer.session import Sentry
from trainkit.swarm.protocol.messages import CREDITS, PeerProgress, RoundClock
from trainkit.swarm.trust.reducers import Round
from trainkit.swarm.trust.screening import Findings

pytestmark = pytest.mark.usefixtures("hivemind_here")

ME, ANOTHER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmS4aGLVN18yCqRSccfXxhdjve8BkLcAGf2yJjFA453wDz"
TOLD = PeerProgress("creator", 3, 64, 10.0, 0.5, 2, time=1000.0)


def at(host: str, peer: str = ME) -> str:
    return f"/ip4/{host}/tcp/4711/p2p/{peer}"


HERE, THERE = [at("10.0.0.1"), at("127.0.0.1")], at("10.0.0.2")


def dialled(told: PeerProgress | None, known: Sequence[str], answering: Sequence[str] = ()) -> list[str]:
    """Whom a creator asks that comes back, where the swarm knows ``told`` of it, and these addresses answer."""
    from trainkit.swarm.peer.creator import require_alone

    asked: list[str] = []

    def in_dht(work: Any, seconds: float, otherwise: Any) -> list[str]:
        asked.extend(work.keywords["at"])
        return [item for item in asked if item in answering]

    progress = {} if told is None else {ME: told}
    node: Any = SimpleNamespace(peer_id=ME, addresses=lambda: HERE, progress=lambda: progress, in_dht=in_dht)
    require_alone(node, known)
    return asked


def test_a_creator_comes_back_where_it_was_or_moves_if_that_is_silent() -> None:
    assert dialled(replace(TOLD, addresses=HERE), HERE, HERE) == []
    assert dialled(None, (THERE, at("10.0.0.3", ANOTHER))) == [THERE]


@pytest.mark.parametrize("known", [(THERE,), ()])
def test_a_creator_that_answers_elsewhere_is_not_doubled(known: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="already continues on another machine") as refused:
        dialled(replace(TOLD, addresses=[THERE]), known, [THERE])
    assert THERE in refused.value.why


@pytest.mark.parametrize(("since", "moved"), [(899.0, False), (900.0, False), (901.0, True)])
def test_of_two_creators_of_a_run_the_one_that_was_started_later_goes_on(since: float, moved: bool) -> None:
    """The others hear no word of it: to them the run has not ended."""
    from trainkit.swarm.peer.creator import Creator

    said: list[str] = []
    creator: Any = Creator(ExitStack(), load("hivemind").config, PeerSpec("me"), Hooks(lambda: False, said.append))
    creator.own_addresses, creator.since, creator.dht = HERE, 900.0, SimpleNamespace(peer_id=ME)
    creator.watch = SimpleNamespace(since=since, peers={ME: replace(TOLD, addresses=HERE)})
    creator.watch.poll = lambda: creator.watch.peers.update({ME: replace(TOLD, addresses=[THERE])})
    assert creator.has_moved is moved
    creator.leave("moved")
    assert f"was started later, at {THERE}." in said[0]


def test_a_creator_takes_back_what_is_later_until_it_has_averaged() -> None:
    from trainkit.swarm.peer.creator import Creator
    from trainkit.swarm.peer.records import PeerRound

    said, asked, given = list[str](), list[float](), iter((None, 9, None, None))
    creator: Any = Creator(ExitStack(), load("hivemind").config, PeerSpec("me"), Hooks(lambda: False, said.append))
    creator.watch = SimpleNamespace(poll=lambda: None)
    creator.averaging = SimpleNamespace(require_helpers=lambda: None)

    def take_back(newer_than: float) -> int | None:
        asked.append(newer_than)
        return next(given)

    creator.averaging.take_back = take_back
    for back_at, used in ((5, "nothing"), (None, "own"), (None, "average"), (None, "average")):
        creator.back_at = back_at or creator.back_at
        creator.hear()
        creator.after_round(PeerRound(9, result=Round(2, used, "", 0.0, False)))
    assert asked == [5, 5, 9, math.inf]
    assert ["the weights of round 9" in line for line in said] == [True]


@pytest.mark.parametrize(("alone", "heard", "stays"), [(0, 0, True), (3, 0, False), (3, 1, True)])
def test_it_stays_until_those_have_heard_its_goodbye_whom_it_has(
    alone: int, heard: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has just slept has heard of nobody lately."""
    from trainkit.swarm.peer.creator import Creator

    creator: Any = Creator(ExitStack(), load("hivemind").config, PeerSpec("me"), Hooks(lambda: False, print))
    assert creator.rounds_alone == 3
    slept, said = list[float](), list[bool]()
    creator.publish = lambda stopped, wait: said.append(stopped)
    creator.clock, creator.rounds_alone = RoundClock(4.0, 0, 10), alone
    creator.watch = SimpleNamespace(others=lambda since: dict.fromkeys(range(heard)), pause=0.5)
    monkeypatch.setattr("trainkit.swarm.peer.creator.time", SimpleNamespace(time=time.time, sleep=slept.append))
    creator.leave("stopped")
    assert (said, bool(slept)) == ([True], stays)
    assert min(slept, default=6.5) >= 6.5


def anna(samples: float = 640.0, *, peer: str = "QmAnna", received: int = 0, invited: str | None = None) -> Findings:
    """What the averager has found in a round."""
    return Findings((peer,), (), {peer: samples}, {peer: received}, {} if invited is None else {peer: invited})


PEERS = {"QmAnna": PeerProgress("anna", 3, 640, 80.0, 1.0, 3, 0.0)}


@dataclass
class Account:
    """The account of a run, by a creator that may be killed; what it tells the swarm."""

    run: RunDir
    told: list[Any] = field(default_factory=list)
    found: list[Findings] = field(default_factory=list)

    def __post_init__(self) -> None:
        from trainkit.swarm.peer.creator import Creator

        creator: Any = Creator(ExitStack(), load("hivemind").config, PeerSpec("me"), Hooks(lambda: False, print))
        creator.writer, creator.clock = Attempt(self.run, 0), RoundClock(60.0, 0, 10)
        store = lambda key, value, seconds: self.told.append((key, value))  # noqa: E731
        creator.dht = SimpleNamespace(store=store, member=lambda peer: None)
        creator.bans = Bans(None)
        creator.peer_id = "QmMe"
        creator.role = "owner"
        creator.credits = Contributions.of(self.run)
        creator.averaging = SimpleNamespace(averager=SimpleNamespace(findings=lambda: [self.found.pop()]))
        self.creator, self.sentry = creator, Sentry(creator)

    def after_round(self, found: Findings, peers: Mapping[str, PeerProgress] = PEERS) -> list[Contribution]:
        """Count one; what is in the run folder then."""
        self.found.append(found)
        self.creator.watch = SimpleNamespace(peers=peers)
        self.sentry.after_round(0, Round(1, "average", "", 1.0, drifted=False))
        return Contributions.of(self.run).best_first()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n")


def test_each_round_goes_into_the_run_folder_and_to_the_swarm(run: RunDir) -> None:
    account, expected = Account(run), [Contribution("anna", 1, 640.0, 60.0)]
    assert account.after_round(anna()) == expected
    row = {"name": "anna", "rounds": 1, "samples": 640.0, "seconds": 60.0, "bytes": 0}
    assert account.told == [(CREDITS, [row])]
    # One that was killed goes on counting.
    assert Account(run).after_round(anna()) == [Contribution("anna", 2, 1280.0, 120.0)]


@pytest.mark.parametrize(
    ("said", "invited", "name"), [("best", "anna", "anna"), ("carl", "guest", "guest carl"), (None, "anna", "anna")]
)
def test_credit_goes_to_the_name_that_the_owner_has_signed(
    run: RunDir, said: str | None, invited: str, name: str
) -> None:
    """At once, and with a new key; where many use one invitation, what each says of itself tells them apart."""
    account = Account(run)
    for number, peer in enumerate(("QmBefore", "QmAfter"), 1):
        peers = {} if said is None else {peer: replace(PEERS["QmAnna"], name=said)}
        found = anna(peer=peer, received=57_000, invited=invited)
        assert account.after_round(found, peers) == [
            Contribution(name, number, 640.0 * number, 60.0 * number, 57_000 * number)
        ]


def test_a_full_disk_stops_no_round_and_costs_nobody_credit(run: RunDir) -> None:
    from trainkit.swarm.peer.records import PeerRound

    def full(self: Contributions, run: RunDir) -> None:
        raise OSError(28, "No space left on device")

    account = Account(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contributions, "write", full)
        account.after_round(anna())
    assert account.told[0][1][0]["samples"] == 640.0
    assert Contributions.of(run).rows() == []
    account.creator.after_round(PeerRound(10))  # alone
    assert [row["samples"] for row in Contributions.of(run).rows()] == [640.0]
    account.creator.withdraw("anna")
    account.creator.after_round(PeerRound(11))
    assert Contributions.of(run).rows() == []
