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
from trainkit.config.loading import load
from trainkit.config.schema import CollaborativeConfig
from trainkit.data import build_data
from trainkit.data.base import Splits
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RunFailedError
from trainkit.models import build_model
from trainkit.ranks import RankEnv
from trainkit.swarm import address
from trainkit.swarm.address import Hooks, PeerSpec
from trainkit.swarm.admission import Board
from trainkit.swarm.average import Averaging, Link
from trainkit.swarm.messages import PeerProgress, UpdateClock
from trainkit.swarm.robust import Round
from trainkit.swarm.rounds import SampleLoop, Tally, TimedLoop, search_seconds, take_part
from trainkit.swarm.session import Session, Team
from trainkit.swarm.sync import Average, Given, GradientState, OuterState, gathering
from trainkit.training.build import alone, build
from trainkit.training.update import DivergedError

pytestmark = pytest.mark.usefixtures("hivemind_here")


CPU = Distributed(RankEnv.single(), torch.device("cpu"))
SIZES = ("train.micro_batch_size=16", "train.global_batch_size=64", "collaborative.matchmaking_seconds=0.1")
CONFIG = load("hivemind_gradients", [*QUICK, *SIZES, "data.workers=0", "collaborative.rounds=3"]).config
OWNER, GUEST = "owner", "guest"
SECONDS = 0.5
"""A round may last."""


@pytest.fixture(scope="module")
def splits() -> Splits:
    return build_data(CONFIG.data)


@dataclass
class Swarm:
    """What the loop asks of the swarm: the averaging, the news, and who is who."""

    common: GradientState
    role: str = "owner"
    client_mode: bool = False
    tried: bool = False
    others: dict[str, PeerProgress] = field(default_factory=dict)
    fails: int = 0
    """So many rounds come to nothing."""
    strays: bool = False
    """Its weights are others than those of the owner's side, until it has taken over that state."""
    dies: bool = False
    """All others, as soon as a group has formed."""
    newer: tuple[int, Tensor, Tensor] | None = None
    """A state that the owner's side gives away."""
    search: object = None
    found = False
    searches: int = 0
    given: list[Given] = field(default_factory=list)
    leads: list[bool] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    told: list[PeerProgress] = field(default_factory=list)
    adopted: list[int] = field(default_factory=list)
    rounds: list[Any] = field(default_factory=list)
    """That the peer has taken note of."""

    def begin(self, boundary: float, samples_per_sec: float, *, grace: float) -> None:
        assert self.search is None
        self.search, self.searches = "begun", self.searches + 1
        if self.dies:
            self.found, self.others = True, {}

    def withdraw(self) -> None:
        self.search, self.found = None, False

    def require_helpers(self) -> None: ...

    def signed(self) -> bytes:
        return b"by me"

    def exchange(self, *, samples: int, trained: float, next_round: int) -> None:
        self.search = None
        self.given.append(self.common.give(samples))

    def settle(self, seconds: float, *, trained_on: bool, leads: bool) -> Round:
        given = self.given[-1]
        self.leads.append(leads)
        everything = [True] * len(given.weights)
        used = "average" if self.others and self.fails <= 0 else "own" if leads else "nothing"
        self.fails -= 1
        if used != "nothing":
            self.common.step(Average(given.vector, self.common.round + 1, everything, everything), given)
        strays = used == "nothing" and self.strays and not self.adopted
        return Round(2 if used == "average" else 0, used, "" if used == "average" else "no others", 0.0, strays)

    def adopt(self, seconds: float, *, newer_than: int = -1) -> bool:
        if self.newer is None or self.newer[0] <= newer_than:
            return False
        round_index, theta, momentum = self.newer
        self.common.load(theta, momentum, round_index)
        self.adopted.append(round_index)
        return True


@contextmanager
def peer(splits: Splits, *, until: int = 99, may_be_alone: bool = True, **facts: Any) -> Iterator[Any]:
    """A peer and its swarm; after so many rounds it is told to leave."""
    common = GradientState(build_model(CONFIG.model, splits.info, CONFIG.seed), CONFIG)
    judge = build(alone(CONFIG), CPU, splits, model=common.model)
    swarm = Swarm(common, **facts)
    p: Any = Session(ExitStack(), PeerSpec("me"), Hooks(lambda: len(swarm.rounds) >= until, swarm.said.append))
    p.after_round = swarm.rounds.append
    p.may_be_alone, p.data_seed = may_be_alone, 5
    p.config, p.common, p.averaging = CONFIG, common, swarm
    p.team = Team(gathering(judge, common.gathered), judge, common)
    p.clock = UpdateClock(SECONDS, 0, 3, lambda: common.round)
    nothing: Any = lambda *_: None  # noqa: E731
    p.dht = SimpleNamespace(
        client_mode=swarm.client_mode,
        own=SimpleNamespace(grant=SimpleNamespace(role=swarm.role)),
        member=lambda peer: SimpleNamespace(trusted=peer == OWNER, name=peer, invitation=peer),
        peer_id="me",
        publish_progress=lambda told, seconds: swarm.told.append(told),
        excluded=SimpleNamespace(require_welcome=nothing),
        look_for=nothing,
    )
    p.watch = SimpleNamespace(
        poll=nothing, peers={}, stopped=False, first_round=0, reachable=tuple,
        others=lambda since: {name: one for name, one in swarm.others.items() if one.time >= since},
    )  # fmt: skip
    p.sentry = SimpleNamespace(look=nothing, after_round=nothing)
    yield p, swarm


def told(*, round_index: int = 0, samples: int = 0) -> PeerProgress:
    """It stays fresh for longer than a test lasts."""
    return PeerProgress("x", round_index, samples, 0.0, 0.0, 1, time.time() + 5.0)


@pytest.mark.parametrize(("peers", "latest"), [(3, 0.01), (100, 0.3), (1000, 1.5)])
def test_many_who_only_call_out_begin_to_look_one_after_the_other(peers: int, latest: float) -> None:
    config = load("hivemind").config.collaborative
    assert search_seconds(config, peers, calls_out=False) == 3.0
    found = sorted(3.0 - search_seconds(config, peers, calls_out=True) for _ in range(100))
    assert 0.0 <= found[0] < 0.1 * latest < 0.8 * latest < found[-1] <= latest


def test_one_peer_alone_makes_the_updates_of_the_whole_batch(splits: Splits) -> None:
    with peer(splits) as (p, swarm):
        p.clock = replace(p.clock, seconds=60.0)  # else a busy machine ends a round before it is full
        assert take_part(p) == "finished"
    assert [(done.index, done.samples, done.result.used) for done in swarm.rounds] == [(i, 64, "own") for i in range(3)]
    assert [set(given.weights) for given in swarm.given] == [{64.0}] * 3
    assert swarm.searches == 0  # nobody is there
    assert (p.progress.step, p.progress.position) == (3, 12)


def test_all_who_train_are_audited_but_the_owner() -> None:
    """Also who reduces; one that says that it does not train counts for nothing."""
    roles = {
        "me": "owner",
        "twin": "owner",
        "rita": "reducer",
        "idle": "reducer",
        "ann": "volunteer",
        "eve": "volunteer",
    }
    news = {one: replace(told(), samples_per_sec=0.0 if one in ("idle", "eve") else 8.0) for one in roles}
    drawn, expected, known = list[Any](), Board(), set[str]()

    def draw(names: Iterable[str], heard: Any) -> dict[str, bool]:
        known.update(names)
        return {"rita": True}

    auditor: Any = SimpleNamespace(
        hear=lambda tried: None, owe=lambda heard: [], differ={"eve": 3}, verified={"ann": 64.0}, unproven={"eve"},
        draw=draw,
    )  # fmt: skip
    averager = SimpleNamespace(heard=lambda: None, draw=lambda *of: drawn.append(of), known=expected)
    loop: Any = SimpleNamespace(
        auditor=auditor,
        peer=SimpleNamespace(
            clock=SimpleNamespace(seconds=4.0), averaging=SimpleNamespace(averager=averager),
            watch=SimpleNamespace(peers=news, others=lambda since: {one: news[one] for one in news if one != "me"}),
            dht=SimpleNamespace(member=lambda one: SimpleNamespace(role=roles[one])),
        ),
    )  # fmt: skip
    TimedLoop.before_exchange(loop, 7)
    assert known == {"rita", "ann", "eve"}  # a volunteer that tells of no speed is none the less drawn
    assert drawn == [({"rita": True}, 7)]
    assert expected.read() == {"verified": {"ann": 64.0, "eve": 0.0, "idle": 0.0}, "differ": ["eve"]}


@pytest.mark.parametrize(("others_at", "stays"), [(2, True), (3, False)])
def test_the_owners_side_stays_as_long_as_somebody_lacks_the_last_update(
    splits: Splits, others_at: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.swarm.rounds._PUBLISH_SECONDS", 0.1)
    with peer(splits, others={GUEST: told(round_index=others_at)}) as (p, swarm):
        assert take_part(p) == "finished"
    news = [one for one in swarm.told if one.round == 3]
    assert (len(news) > 2) == stays  # one of them with the last round, one at the end
    assert time.time() - news[0].time < 4 * SECONDS  # and not for ever


def guest(splits: Splits, *, until: int = 1, **facts: Any) -> Any:
    """A volunteer behind a router."""
    return peer(splits, until=until, role="volunteer", client_mode=True, may_be_alone=False, **facts)


def test_what_the_others_have_gathered_need_not_be_gathered_here(splits: Splits) -> None:
    with guest(splits, others={OWNER: told(samples=40)}) as (p, swarm):
        assert take_part(p) == "stopped"
    assert [(done.samples, done.result.used, done.peers) for done in swarm.rounds] == [(32, "average", 2)]
    assert swarm.searches == 1
    assert swarm.told[0].samples == 0
    assert swarm.told[-1].round == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dies", [False, True], ids=["nobody is there", "all die once a group has formed"])
def test_a_volunteer_that_is_left_alone_makes_no_update_and_leaves(splits: Splits, dies: bool) -> None:
    with guest(splits, others={OWNER: told()} if dies else {}, dies=dies) as (p, swarm):
        began = time.time()
        assert take_part(p) == "lost"
    assert (swarm.search, swarm.searches, swarm.rounds, swarm.given, swarm.common.round) == (None, dies, [], [], 0)
    assert 3 * SECONDS <= time.time() - began < 20.0
    assert swarm.common.samples == 64  # it has gathered one update's worth, and no more


def test_a_round_that_fails_is_tried_again_with_the_same_gradients(splits: Splits) -> None:
    with peer(splits, others={GUEST: told()}, fails=2, until=1) as (p, swarm):
        assert take_part(p) == "stopped"
    first, *again = swarm.given
    assert len(again) == 2
    assert all(torch.equal(given.vector, first.vector) for given in again)
    assert [(done.index, done.result.used) for done in swarm.rounds] == [(0, "average")]
    assert swarm.said[0] == "  round 1: no average (no others); it is tried again with the same gradients"


def test_the_creator_goes_on_alone_when_the_others_cannot_be_averaged_with(splits: Splits) -> None:
    with peer(splits, others={GUEST: told()}, fails=99, until=1) as (p, swarm):
        assert take_part(p) == "stopped"
    assert swarm.leads == [False, False, False, True]
    assert [done.result.used for done in swarm.rounds] == ["own"]


def test_a_peer_whose_training_diverges_fails(splits: Splits) -> None:
    with peer(splits) as (p, _):
        nn.init.constant_(p.common.params[0], math.nan)
        with pytest.raises(RunFailedError, match="Training has diverged: 3 updates in a row were not finite"):
            take_part(p)


def state_of(splits: Splits, round_index: int) -> tuple[int, Tensor, Tensor]:
    other = GradientState(build_model(CONFIG.model, splits.info, 7), CONFIG)
    return round_index, other.theta, other.momentum


@pytest.mark.parametrize(
    ("is_guest", "others", "facts", "ends", "adopted", "rounds"),
    [
        pytest.param(True, {OWNER: (2, 0)}, {}, "finished", [2], [2], id="the owner's side is ahead"),
        # Where all volunteers have strayed, as when the creator dies while it sends, nobody sends anything any more.
        pytest.param(True, {OWNER: (0, 40)}, {"strays": True, "fails": 1}, "stopped", [0], [0], id="it has strayed"),
        pytest.param(False, {GUEST: (2, 0)}, {"until": 1}, "stopped", [], [0], id="a volunteer says it is ahead"),
    ],
)
def test_a_peer_takes_over_the_state_of_the_owners_side_alone(
    splits: Splits,
    is_guest: bool,
    others: dict[str, tuple[int, int]],
    facts: dict[str, Any],
    ends: str,
    adopted: list[int],
    rounds: list[int],
) -> None:
    progress = {name: told(round_index=index, samples=samples) for name, (index, samples) in others.items()}
    newer = state_of(splits, max(progress[name].round for name in progress))
    with (guest if is_guest else peer)(splits, others=progress, newer=newer, **facts) as (p, swarm):
        assert take_part(p) == ends
    assert (swarm.adopted, [done.index for done in swarm.rounds]) == (adopted, rounds)


def test_a_peer_counts_while_it_is_heard_and_its_clock_may_be_right(splits: Splits) -> None:
    for ahead, heard in ((-11.0, False), (-9.0, True), (5.0, True), (60.0, False)):
        with peer(splits, others={OWNER: replace(told(), time=time.time() + ahead)}) as (p, _):
            assert list(SampleLoop(p, iter(())).others()) == [OWNER] * heard


def test_only_a_volunteer_goes_back_with_a_creator_that_has_come_back(splits: Splits) -> None:
    for role, goes_back in (("volunteer", True), ("reducer", False)):
        with peer(splits, role=role) as (p, swarm):
            swarm.common.round = 2
            loop = SampleLoop(p, iter(()))
            loop.began -= 1.0
            assert loop.has_strayed({OWNER: told(round_index=0)}) is goes_back


def test_peers_that_are_silent_are_looked_for_and_no_others(splits: Splits) -> None:
    """hivemind forgets them: halves of a swarm that was cut in two never met again."""
    anna, ben = (f"/ip4/45.0.0.1/tcp/{port}/p2p/Qm{letter * 44}" for port, letter in ((1, "a"), (2, "b")))
    looked_for = list[Any]()
    with peer(splits, others={address.peer_of(anna): replace(told(), time=math.inf)}) as (p, _):
        p.others, p.dht.look_for = (anna, ben), looked_for.append
        p.before_round()
        p.others = (anna,)
        p.before_round()
    assert looked_for == [[ben]]


def test_a_round_lasts_no_longer_than_its_limit(splits: Splits) -> None:
    """One of three peers has died, and the others are slow."""
    with peer(splits, others={GUEST: told()}, until=1) as (p, swarm):
        judge = p.team.judge
        train_config = judge.config.train.model_copy(update={"global_batch_size": 1 << 20})
        p.team.judge = replace(judge, config=judge.config.model_copy(update={"train": train_config}))
        began = time.time()
        assert take_part(p) == "stopped"
    assert SECONDS <= time.time() - began < 10.0
    assert 0 < swarm.rounds[0].samples < 1 << 20


# A peer whose own training has collapsed in a round gives nothing, and goes on from the common weights.


# How far the weights move in a round, and its loss.
STEADY = [(0.010, 3e-6), (0.011, 2e-6)]
COLLAPSED = (1.4, 0.6)


def alone_own_rounds(*rounds: tuple[float, float | None]) -> tuple[list[Round], list[float], nn.Module]:
    """How the rounds of an owner ended whom nobody has joined, where the common weights then were, and the model."""
    model = nn.Linear(64, 8, bias=False)
    nn.init.zeros_(model.weight)
    common = OuterState(model, lr=1.0, momentum=0.0)
    dht: Any = SimpleNamespace(own=SimpleNamespace(grant=SimpleNamespace(role="owner")), member=lambda peer: None)
    averager: Any = SimpleNamespace(client_mode=False, peer_id="owner", bandwidth=None)
    agreed = CollaborativeConfig()
    averaging = Averaging(averager, dht, common, agreed, Link(512, agreed))
    ended, places = [], []
    for number, (way, loss) in enumerate(rounds):
        with torch.no_grad():
            model.weight.add_(way)
        averaging.exchange(samples=64, trained=1.0, next_round=number + 1, loss=loss)
        result = averaging.settle(0.0, trained_on=False, leads=True)
        assert result is not None
        ended.append(result)
        places.append(round(float(common.theta.mean()), 4))
    return ended, places, model


def test_a_round_in_which_training_has_collapsed_is_given_up() -> None:
    """Weights and loss rose out of proportion."""
    ended, places, model = alone_own_rounds(*STEADY, COLLAPSED, (0.01, 3e-6))
    assert [one.used for one in ended] == ["own", "own", "nothing", "own"]
    assert places == [0.01, 0.021, 0.021, 0.031]
    assert float(next(model.parameters()).detach().mean()) == pytest.approx(0.031)  # it has started anew from there
    assert [one.collapsed for one in ended] == ["", "", "its loss rose from 2e-06 to 0.6", ""]


@pytest.mark.parametrize(
    "last",
    [
        pytest.param((1.4, 1e-6), id="long, as after a round of few updates: the loss has not risen"),
        pytest.param((0.05, 0.6), id="of a higher loss, and no longer than usual: other data"),
        pytest.param((1.4, 5e-4), id="of a loss at which nothing is told wrong"),
        pytest.param((1.4, None), id="not judged by its loss"),
    ],
)
def test_any_other_round_counts(last: tuple[float, float | None]) -> None:
    ended, places, _ = alone_own_rounds(*STEADY, last)
    assert (ended[-1].used, ended[-1].collapsed) == ("own", "")
    assert places[-1] == pytest.approx(0.021 + last[0], abs=1e-3)


def test_the_first_round_and_the_fourth_in_a_row_count_so_nobody_is_stuck() -> None:
    assert [one.used for one in alone_own_rounds(COLLAPSED)[0]] == ["own"]
    assert [one.used for one in alone_own_rounds(*STEADY, *[COLLAPSED] * 4)[0][2:]] == [*["nothing"] * 3, "own"]


@pytest.mark.parametrize(("on_nonfinite", "done"), [("stop", ["settled"]), ("rollback", ["settled", "forgotten"])])
def test_a_peer_that_diverges_first_finishes_what_it_has_given(on_nonfinite: str, done: list[str]) -> None:
    """It was of the round before, and others may still be fetching it."""

    def diverge(*_: object) -> None:
        raise DivergedError("Training has diverged.", why="", fix="")

    found: list[str] = []
    loop: Any = TimedLoop.__new__(TimedLoop)
    loop.config = SimpleNamespace(train=SimpleNamespace(on_nonfinite=on_nonfinite))
    loop.nonfinite = SimpleNamespace(add=diverge)
    loop.settle = lambda seconds: found.append("settled" if seconds == math.inf else "asked")
    common = SimpleNamespace(forget=lambda: found.append("forgotten"))
    clock, progress = SimpleNamespace(seconds=SECONDS), SimpleNamespace(position=0, rollbacks=0)
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


# How far all are with an update.

NOW = 1_000_000.0


def says(samples: int, rate: float = 0.0, *, round_index: int = 3, age: float = 0.0) -> PeerProgress:
    return PeerProgress(
        name="x", round=round_index, samples=samples, samples_per_sec=rate, loss=0.0, group=1, time=NOW - age
    )


def gathered_by(own: Tally, others: dict[str, PeerProgress], trusted: tuple[str, ...]) -> Tally:
    """What ``own`` and the others have gathered by `NOW`; "me" in ``trusted``: this peer is of the owner's side."""
    loop: Any = SampleLoop.__new__(SampleLoop)
    loop.common, loop.volunteers = SimpleNamespace(round=3, samples=own.samples), "me" not in trusted
    dht = SimpleNamespace(
        peer_id="me",
        member=lambda peer: SimpleNamespace(trusted=peer in trusted, name=peer, invitation=peer),
    )
    team = SimpleNamespace(state=SimpleNamespace(micro_batch_size=own.samples_per_sec))
    loop.peer = SimpleNamespace(dht=dht, team=team, step_seconds=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: NOW)
        return loop.tally(others)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("own", "others", "trusted", "gathered"),
    [
        (Tally(100, 10), {"a": says(150, 20), "b": says(50, 5), "behind": says(999, 50, round_index=2)}, (), (250, 25)),
        (Tally(100, 50), {"a": says(60, 40, age=1.0)}, (), (200, 80)),  # it has gathered since it has spoken
        (Tally(100, 10), {"liar": says(1 << 50, 1e9), "a": says(100, 10), "b": says(100, 10)}, (), (400, 40)),
        (Tally(100, 10), {"fast": says(5000, 500)}, ("fast",), (5100, 510)),
        # Both ends of a bound come to the same sum: else the fast one would wait while the slow one gathers the rest.
        (Tally(100, 10), {"fast": says(5000, 500)}, (), (200, 20)),
        (Tally(5000, 500), {"owner": says(100, 10)}, ("owner",), (200, 20)),
    ],
    ids=["all who are at it", "since then", "a volunteer's claim", "the owner's side", "anybody", "its own claim"],
)
def test_an_update_is_gathered_by_all_who_are_at_it(
    own: Tally, others: dict[str, PeerProgress], trusted: tuple[str, ...], gathered: tuple[float, float]
) -> None:
    assert gathered_by(own, others, trusted) == Tally(*gathered)


def test_all_who_use_one_invitation_claim_no_more_than_one_peer(splits: Splits) -> None:
    claims = {"honest": 200, "other": 200, "liar1": 1 << 50, "liar2": 1 << 50, "liar3": 1 << 50}
    others = {peer: says(samples, round_index=0) for peer, samples in claims.items()}
    with peer(splits) as (p, _):
        p.dht.member = lambda peer: SimpleNamespace(trusted=False, name=peer, invitation=peer.rstrip("123"))
        assert SampleLoop(p, iter(())).tally(others).samples == pytest.approx(200 + 200 + 200)


def test_the_owners_own_claim_has_no_bound_and_the_time_that_is_left_follows() -> None:
    found = gathered_by(Tally(5000, 500), {"a": says(100, 10)}, ("me",))
    assert (found, found.seconds_left(15300)) == (Tally(5100, 510), 20.0)
    assert (Tally(300, 35).seconds_left(300), Tally(0, 0).seconds_left(1)) == (0.0, math.inf)
