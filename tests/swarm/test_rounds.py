"""The loops of a peer, with a swarm around it that the test plays."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rank_functions import QUICK
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import RunFailedError
from trainkit.config.loading import load
from trainkit.data.base import Splits
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import Distributed
from trainkit.models.library import build_model
from trainkit.swarm.identity.admission import Board
from trainkit.swarm.peer.peer_ranks import PeerRanks
from trainkit.swarm.peer.place import Hooks, PeerSpec
from trainkit.swarm.peer.rounds import RoundLoop, search_seconds, take_part
from trainkit.swarm.peer.session import LOST_AFTER, Session
from trainkit.swarm.protocol import addresses
from trainkit.swarm.protocol.messages import PeerProgress, RoundClock
from trainkit.swarm.protocol.outer_step import Average, OuterState, OwnPart
from trainkit.swarm.trust.reducers import Round
from trainkit.training.train_state import alone, build
from trainkit.training.update import DivergedError

pytestmark = pytest.mark.usefixtures("hivemind_here")


CPU = Distributed(RankEnv.single(), torch.device("cpu"))
SIZES = ("train.global_batch_size=16", "collaborative.matchmaking_seconds=0.2")
CONFIG = load("hivemind", [*QUICK, *SIZES, "data.workers=0", "collaborative.rounds=3"]).config
OWNER = "owner"
SECONDS = 1.5
"""A round lasts."""


@pytest.fixture(scope="module")
def splits() -> Splits:
    return build_data(CONFIG.data)


@dataclass
class Swarm:
    """What the loop asks of the swarm: the averaging, the news, and who is who."""

    common: OuterState
    role: str = "owner"
    client_mode: bool = False
    tried: bool = False
    others: dict[str, PeerProgress] = field(default_factory=dict)
    drifts: bool = False
    """Its weights are others than those of the owner's side, until it has taken over that state."""
    newer: tuple[int, Tensor, Tensor] | None = None
    """A state that the owner's side gives away."""
    search: object = None
    under_way: OwnPart | None = None
    given: list[OwnPart] = field(default_factory=list)
    told: list[PeerProgress] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    rounds: list[Any] = field(default_factory=list)
    """That the peer has taken note of."""

    def begin(self, boundary: float, samples_per_sec: float) -> None:
        assert self.search is None
        self.search = "begun"

    def require_helpers(self) -> None: ...

    def signed(self) -> bytes:
        return b"by me"

    def exchange(self, *, samples: int, trained: float, next_round: int) -> None:
        assert self.search == "begun"
        self.search, self.under_way = None, self.common.give(samples)
        self.given.append(self.under_way)

    def settle(self, seconds: float, *, trained_on: bool, leads: bool) -> Round:
        given, self.under_way = self.under_way, None
        assert given is not None
        used = "average" if self.others else "own" if leads else "nothing"
        there = [used != "nothing"] * len(given.weights)
        self.common.step(Average(given.vector, self.common.round + 1, there, there), given, trained_on=trained_on)
        drifted = self.drifts and not self.adopted
        return Round(2 if self.others else 0, used, "" if self.others else "no others", 0.0, drifted)

    def adopt(self, seconds: float, *, newer_than: int = -1) -> bool:
        if self.newer is None or self.newer[0] <= newer_than:
            return False
        round_index, theta, momentum = self.newer
        self.common.load(theta, momentum, round_index)
        self.adopted.append(round_index)
        return True


@contextmanager
def peer(splits: Splits, *, until: int = 99, may_be_alone: bool = True, rounds: int = 3, **facts: Any) -> Iterator[Any]:
    """A peer and its swarm; after so many rounds it is told to leave."""
    common = OuterState(build_model(CONFIG.model, splits.info, CONFIG.seed), lr=0.7, momentum=0.9)
    judge = build(alone(CONFIG), CPU, splits, model=common.model)
    swarm = Swarm(common, **facts)
    hooks = Hooks(lambda: len(swarm.rounds) >= until, print, beat=lambda: time.sleep(0.02))  # or it takes a whole core
    p: Any = Session(ExitStack(), PeerSpec("me"), hooks)
    p.after_round = swarm.rounds.append
    p.may_be_alone, p.data_seed = may_be_alone, 5
    p.config, p.common, p.averaging = CONFIG, common, swarm
    p.team = PeerRanks(judge, judge, common)
    p.clock = RoundClock.starting(time.time(), SECONDS, rounds)
    p.role = swarm.role
    nothing: Any = lambda *_: None  # noqa: E731
    p.dht = SimpleNamespace(
        client_mode=swarm.client_mode,
        publish_progress=lambda told, seconds: swarm.told.append(told),
        excluded=SimpleNamespace(require_welcome=nothing),
        look_for=nothing,
    )
    p.watch = SimpleNamespace(
        poll=nothing, peers={}, stopped=False, first_round=p.clock.first, reachable=tuple,
        others=lambda since: {name: one for name, one in swarm.others.items() if one.time >= since},
    )  # fmt: skip
    p.sentry = SimpleNamespace(look=nothing, after_round=nothing)
    with pytest.MonkeyPatch.context() as patch:  # nobody is there who could be audited, or audits
        patch.setattr("trainkit.swarm.peer.rounds.Auditor", lambda *of: None)
        patch.setattr("trainkit.swarm.peer.rounds.Journal", lambda *of: None)
        yield p, swarm


def told() -> PeerProgress:
    """It stays fresh for longer than a test lasts."""
    return PeerProgress("x", 0, 0, 0.0, 0.0, 1, time.time() + 5.0)


@pytest.mark.timeout(60)
def test_the_end_of_a_run_waits_for_audits_of_the_last_rounds(splits: Splits) -> None:
    """A liar that nobody has looked at, yet, would be in the weights for good."""
    with peer(splits) as (p, swarm):
        loop = RoundLoop(p, iter(()))
        began = time.monotonic()
        ready = {0.3: "half of a lie", 0.9: "the other one"}
        looked, noted = list[Any](), list[Any]()

        def shown() -> Any:
            due = [at for at in ready if time.monotonic() - began > at]
            return ready.pop(due[0]) if due else None

        swarm.averager = SimpleNamespace(shown=shown, awaited=lambda: len(ready))
        p.sentry.note_audit = lambda index, verdict: noted.append((index, verdict))

        def audit(work: str) -> str:
            looked.append(work)
            return f"on {work}"

        loop.auditor = SimpleNamespace(audit=audit)  # type: ignore[assignment]
        loop.close()
        assert looked == ["half of a lie", "the other one"]
        assert noted == [(2, f"on {work}") for work in looked]
        ready[0.0] = "more"
        p.hooks = replace(p.hooks, stop_requested=lambda: True)
        loop.close()  # who presses Ctrl-C does not want to wait
        assert ready


@pytest.mark.timeout(60)
def test_a_volunteer_stays_until_it_has_shown_what_is_wanted(splits: Splits) -> None:
    with peer(splits, role="volunteer") as (p, swarm):
        loop = RoundLoop(p, iter(()))
        p.journal = "something to show"
        over = time.monotonic() + 0.5

        class Showing:
            @property
            def is_showing(self) -> bool:
                return time.monotonic() < over

        swarm.averager = Showing()
        loop.close()
        assert over < time.monotonic() < over + 20.0


@pytest.mark.parametrize(("peers", "latest"), [(3, 0.01), (100, 0.3), (1000, 1.5)])
def test_many_who_only_call_out_begin_to_look_one_after_the_other(peers: int, latest: float) -> None:
    config = load("hivemind").config.collaborative
    assert search_seconds(config, peers, calls_out=False) == 3.0
    found = sorted(3.0 - search_seconds(config, peers, calls_out=True) for _ in range(100))
    assert 0.0 <= found[0] < 0.1 * latest < 0.8 * latest < found[-1] <= latest


@pytest.mark.timeout(60)
def test_one_peer_alone_makes_as_many_updates_as_the_clock_lets_it(splits: Splits) -> None:
    with peer(splits) as (p, swarm):
        assert take_part(p) == "finished"
        assert p.clock.end <= time.time() < p.clock.end + SECONDS
    assert [(done.index, done.result.used) for done in swarm.rounds] == [(i, "own") for i in range(3)]
    assert all(done.samples and done.samples % 16 == 0 for done in swarm.rounds)
    assert [set(given.weights) for given in swarm.given] == [{float(done.samples)} for done in swarm.rounds]
    assert sum(done.samples for done in swarm.rounds) == 16 * p.progress.position
    assert [told.round for told in swarm.told] == [0, 0, 1, 2]  # once before the first round, so that others find it


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("until", "ending", "closed"), [(99, "finished", 1), (0, "stopped", 0)])
def test_a_run_is_closed_when_all_its_rounds_are_done(
    splits: Splits, monkeypatch: pytest.MonkeyPatch, until: int, ending: str, closed: int
) -> None:
    found = list[int]()
    monkeypatch.setattr(RoundLoop, "close", lambda self: found.append(self.peer.common.round))
    with peer(splits, until=until, rounds=1) as (p, _):
        assert take_part(p) == ending
    assert found == [1] * closed  # after the last exchange was settled


def test_all_who_train_are_audited_but_the_owner() -> None:
    """Also who reduces; one that says that it does not train counts for nothing."""
    roles = dict.fromkeys(("me", "twin"), "owner") | dict.fromkeys(("rita", "idle"), "reducer")
    roles |= dict.fromkeys(("ann", "eve"), "volunteer")
    news = {one: replace(told(), samples_per_sec=0.0 if one in ("idle", "eve") else 8.0) for one in roles}
    drawn, expected, known, last = list[Any](), Board(), set[str](), list[bool]()

    def draw(names: Iterable[str], heard: Any, *, is_last: bool) -> dict[str, bool]:
        last.append(is_last)
        known.update(names)
        return {"rita": True}

    auditor: Any = SimpleNamespace(
        hear=lambda tried: None, owe=lambda heard: [], differ={"eve": 3}, verified={"ann": 64.0}, unproven={"eve"},
        in_good_standing={"ann": None}, draw=draw,
    )  # fmt: skip
    averager = SimpleNamespace(heard=lambda: None, draw=lambda *of: drawn.append(of), known=expected)
    loop: Any = SimpleNamespace(
        auditor=auditor, clock=SimpleNamespace(seconds=4.0, count=9), averaging=SimpleNamespace(averager=averager),
        peer=SimpleNamespace(
            watch=SimpleNamespace(peers=news, others=lambda since: {one: news[one] for one in news if one != "me"}),
            dht=SimpleNamespace(member=lambda one: SimpleNamespace(role=roles[one])),
        ),
    )  # fmt: skip
    RoundLoop.before_exchange(loop, 8)
    drawn.clear()
    RoundLoop.before_exchange(loop, 7)
    assert last == [True, False]
    assert known == {"rita", "ann", "eve"}  # a volunteer that tells of no speed is none the less drawn
    assert drawn == [({"rita": True}, 7)]
    counts = {"ann": 64.0, "eve": 0.0, "idle": 0.0}
    assert expected.read() == {"verified": counts, "differ": ["eve"], "passed": ["ann"]}


def guest(splits: Splits, *, until: int = 1, **facts: Any) -> Any:
    """A volunteer behind a router."""
    return peer(splits, until=until, role="volunteer", client_mode=True, may_be_alone=False, **facts)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("role", ["owner", "volunteer"])
def test_a_volunteer_that_is_left_alone_leaves_and_the_owner_goes_on(splits: Splits, role: str) -> None:
    is_guest = role == "volunteer"
    with (guest if is_guest else peer)(splits, until=99, rounds=5) as (p, swarm):
        assert take_part(p) == ("lost" if is_guest else "finished")
    used = [done.result.used for done in swarm.rounds]
    assert used == (["nothing"] * LOST_AFTER if is_guest else ["own"] * 5)
    assert bool(swarm.common.momentum.any()) is not is_guest  # all that it has learned waits for the others


def test_what_a_peer_has_trained_goes_into_the_average_with_the_others(splits: Splits) -> None:
    with guest(splits, others={OWNER: told()}) as (p, swarm):
        assert take_part(p) == "stopped"
    (done,) = swarm.rounds
    assert (done.result.used, done.peers) == ("average", 2)
    assert [one.round for one in swarm.told] == [0, 0]
    assert swarm.told[-1].samples == done.samples > 0


@pytest.mark.timeout(60)
def test_a_peer_whose_training_diverges_fails(splits: Splits) -> None:
    with peer(splits) as (p, _):
        nn.init.constant_(p.common.params[0], math.nan)
        with pytest.raises(RunFailedError, match="Training has diverged: 3 updates in a row were not finite"):
            take_part(p)


def state_of(splits: Splits, round_index: int) -> tuple[int, Tensor, Tensor]:
    other = OuterState(build_model(CONFIG.model, splits.info, 7), lr=0.7, momentum=0.9)
    return round_index, other.theta, other.momentum


@pytest.mark.timeout(60)
@pytest.mark.parametrize("newer", [0, 1])
def test_a_peer_with_other_weights_takes_over_the_state_of_the_round(splits: Splits, newer: int) -> None:
    """One of the round before is asked for again: the giver has not made the step of this round yet."""
    with guest(splits, until=2, others={OWNER: told()}, drifts=True, newer=state_of(splits, newer)) as (p, swarm):
        assert take_part(p) == "stopped"
    assert swarm.adopted == [1] * newer


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("role", "adopted"), [("owner", []), ("volunteer", [2])])
def test_whoever_has_slept_takes_over_the_owners_state(splits: Splits, role: str, adopted: list[int]) -> None:
    with peer(splits, role=role, until=1, rounds=9, newer=state_of(splits, 2)) as (p, swarm):
        p.clock = replace(p.clock, first=p.clock.first - 3)
        p.watch.first_round = p.clock.first
        assert take_part(p) == "stopped"
    assert swarm.adopted == adopted


def test_peers_that_are_silent_are_looked_for_and_no_others(splits: Splits) -> None:
    """hivemind forgets them: halves of a swarm that was cut in two never met again."""
    anna, ben = (f"/ip4/45.0.0.1/tcp/{port}/p2p/Qm{letter * 44}" for port, letter in ((1, "a"), (2, "b")))
    looked_for = list[Any]()
    with peer(splits, others={addresses.peer_of(anna): replace(told(), time=math.inf)}) as (p, _):
        p.others, p.dht.look_for = (anna, ben), looked_for.append
        p.before_round()
        p.others = (anna,)
        p.before_round()
    assert looked_for == [[ben]]


@pytest.mark.parametrize(("on_nonfinite", "done"), [("stop", ["settled"]), ("rollback", ["settled", "forgotten"])])
def test_a_peer_that_diverges_first_finishes_what_it_has_given(on_nonfinite: str, done: list[str]) -> None:
    """It was of the round before, and others may still be fetching it."""

    def diverge(*_: object) -> None:
        raise DivergedError("Training has diverged.", why="", fix="")

    found: list[str] = []
    loop: Any = RoundLoop.__new__(RoundLoop)
    loop.config = SimpleNamespace(train=SimpleNamespace(on_nonfinite=on_nonfinite))
    loop.nonfinite = SimpleNamespace(add=diverge)
    loop.settle = lambda seconds: found.append("settled" if seconds == math.inf else "asked")
    common = SimpleNamespace(forget=lambda: found.append("forgotten"))
    clock, progress = SimpleNamespace(seconds=SECONDS), SimpleNamespace(position=0, rollbacks=0)
    loop.clock = clock
    loop.peer = SimpleNamespace(clock=clock, step_seconds=0.0, progress=progress, common=common)
    with nullcontext() if on_nonfinite == "rollback" else pytest.raises(DivergedError):
        loop.note_update(None, 1, 0.0)
    assert found == done


def test_right_weights_are_asked_for_until_given_or_the_time_is_over() -> None:
    """In round 7; a state from before that round's step is not taken over."""

    def asked(gives: list[int], seconds: float, *, until: int = 10_000) -> tuple[bool, list[bool]]:
        found: list[bool] = []

        def adopt(left: float, *, newer_than: int) -> bool:
            found.append(gives[len(found)] > newer_than)
            return found[-1]

        peer: Any = Session(ExitStack(), PeerSpec("me"), Hooks(lambda: len(found) >= until, print))
        peer.averaging, peer.clock = SimpleNamespace(adopt=adopt), SimpleNamespace(seconds=0.2)
        return peer.adopt(seconds, newer_than=6), found

    assert asked([6, 6, 7], 20.0) == (True, [False, False, True])
    is_given, found = asked([6] * 1000, 0.6)
    assert not is_given
    assert 1 <= found.count(False) <= 13
    assert asked([6] * 1000, 600.0, until=1) == (False, [False])  # told to leave
