"""The end of a round: which averages a peer uses, and averages that make the model worse."""

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.rank_functions import QUICK
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import RunFailedError
from trainkit.config.loading import load
from trainkit.data.registry import build_data
from trainkit.data.tensors import TensorSamples
from trainkit.distributed.process_group import Distributed
from trainkit.swarm.identity.admission import Member
from trainkit.swarm.network import processes
from trainkit.swarm.network.exchange import Averaged
from trainkit.swarm.peer.averaging import _NOBODY, Averaging, EndedRound
from trainkit.swarm.peer.trial import AverageTrial
from trainkit.swarm.protocol.codecs import PART
from trainkit.swarm.protocol.outer_step import PROBE_SIZE, Average, ExchangeOutcome, OuterState, OwnPart
from trainkit.swarm.trust.reducers import Round, has_drifted
from trainkit.training.train_state import alone, build

pytestmark = pytest.mark.usefixtures("hivemind_here")

WEIGHTS = torch.linspace(-1, 1, PROBE_SIZE)


def settled(
    *, drifted: bool = False, role: str = "reducer", average: float = 1.0, members: int = 2
) -> tuple[Round, list[tuple[bool, ...]]]:
    """A round of a volunteer that has perhaps drifted from its group's reducer; and which parts it has stepped by."""
    nobody = SimpleNamespace(role="volunteer")
    member = SimpleNamespace(peer_id="reducer", role=role, trusted=True)
    stepped: list[tuple[bool, ...]] = []
    common: Any = SimpleNamespace(num_parameters=4, step=lambda average, *_, **__: stepped.append(average.arrived))
    averager: Any = SimpleNamespace(
        peer_id="me",
        client_mode=True,
        lock_averaged_tensors=threading.Lock(),
        _averaged_tensors=[average * torch.ones(4)],
    )
    dht: Any = SimpleNamespace(member=lambda peer: member, own=SimpleNamespace(grant=nobody))
    link: Any = SimpleNamespace(learn=lambda sent, outcome: "", upload=None)
    averaging = Averaging(averager, dht, common, load("hivemind").config.collaborative, link)
    averaged = Averaged({"me": 8.0, "reducer": 4.0}, drifted, ExchangeOutcome((2,), (members,), (True,), ("reducer",)))
    given = OwnPart(torch.ones(4), (1.0,), torch.ones(4), sound=True)
    return settle(averaging, given, averaged, leads=False), stepped


class Arriving:
    """A state that arrives in so many pieces, one each so many seconds."""

    def __init__(self, pieces: int, averager: Any, clock: Any, seconds: float) -> None:
        self.pieces = pieces
        self.left = pieces
        self.averager = averager
        self.clock = clock
        self.seconds = seconds
        self.cancelled = False

    def done(self) -> bool:
        return self.left == 0

    def result(self, limit: float = 0.0) -> Any:
        if not self.left:
            return SimpleNamespace(round=7), (torch.ones(4), torch.zeros(4))
        self.clock.now += limit
        self.left = max(0, self.pieces - int(self.clock.now / self.seconds))
        self.averager.fetched[0] = 1.0 - self.left / self.pieces
        raise FutureTimeoutError

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize(
    ("pieces", "seconds", "stops_at", "is_taken"),
    [
        pytest.param(40, 0.5, 99.0, True, id="in 20 s, in pieces"),
        pytest.param(2, 12.0, 99.0, False, id="with silences longer than is waited for"),
        pytest.param(100, 0.9, 999.0, False, id="in more than a round"),
        pytest.param(40, 0.5, 5.0, False, id="but Ctrl-C is pressed"),
    ],
)
def test_a_state_is_waited_for_while_it_arrives(
    pieces: int, seconds: float, stops_at: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model's takes minutes by a line at home, which says nothing of whether its giver is there."""
    clock: Any = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("trainkit.swarm.peer.averaging.time", clock)
    averager: Any = SimpleNamespace(fetched=torch.zeros(1))
    fetching = Arriving(pieces, averager, clock, seconds)
    averager.load_state_from_peers = lambda wait: fetching
    loaded: list[int] = []
    common: Any = SimpleNamespace(load=lambda theta, momentum, round_index: loaded.append(round_index))
    config = load("hivemind", ["collaborative.round_seconds=60"]).config.collaborative
    averaging = Averaging(averager, cast(Any, None), common, config, cast(Any, None))
    averaging.stop_requested = lambda: clock.now >= stops_at
    assert averaging.adopt(10.0) == is_taken
    assert loaded == [7] * is_taken
    assert fetching.cancelled == (not is_taken)


def settle(averaging: Averaging, given: OwnPart, averaged: Averaged, *, next_round: int = 3, leads: bool) -> Round:
    """A round in which a peer has given that, and its averager says this."""
    averaging.under_way = EndedRound(
        control=SimpleNamespace(result=lambda seconds: averaged), given=given, sent=given.weights, trained=1.0,
        next_round=next_round, began=time.monotonic(), failed="",
    )  # fmt: skip
    result = averaging.settle(1.0, trained_on=False, leads=leads)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no tensors"), "no tensors"),
        (BrokenPipeError(), "A helper process of this peer died: its averager"),
    ],
)
def test_an_error_of_the_averager_ends_the_search_at_once(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the thread that asks it, the error would be told to nobody."""

    def step(**options: Any) -> None:
        raise error

    monkeypatch.setattr(processes, "_ANSWER_SECONDS", 0.2)
    averager: Any = SimpleNamespace(
        client_mode=True, is_alive=lambda: True, pid=os.getpid(), step=step, probe=torch.zeros_like(WEIGHTS)
    )
    dht: Any = SimpleNamespace(alive=True)
    common: Any = SimpleNamespace(probe=lambda: WEIGHTS)
    unused: Any = None
    with pytest.raises((ValueError, RunFailedError), match=says):
        Averaging(averager, dht, common, load("hivemind").config.collaborative, unused).begin(time.time(), 0.0)


@pytest.mark.parametrize("error", [FutureTimeoutError, asyncio.TimeoutError])
def test_an_exchange_that_takes_too_long_tells_of_the_link(error: type[Exception]) -> None:
    def result(seconds: float) -> Any:
        raise error

    told = list[ExchangeOutcome]()

    def learn(sent: Any, outcome: ExchangeOutcome) -> str:
        told.append(outcome)
        return ""

    link: Any = SimpleNamespace(learn=learn, upload=None)
    averager: Any = SimpleNamespace(peer_id="me", client_mode=True, lock_averaged_tensors=threading.Lock())
    common: Any = SimpleNamespace(num_parameters=4, step=lambda *_, **__: None)
    dht: Any = SimpleNamespace()
    averaging = Averaging(averager, dht, common, load("hivemind").config.collaborative, link)
    given = OwnPart(torch.ones(4), (1.0,), torch.ones(4), sound=True)
    control = SimpleNamespace(result=result, cancel=lambda: None)
    averaging.under_way = EndedRound(control, given, given.weights, 1.0, 3, time.monotonic() - 3600.0, "")
    ended = averaging.settle(0.0, trained_on=False, leads=False)
    assert ended is not None
    assert (ended.used, ended.why, told) == (
        "nothing",
        "the exchange took too long",
        [ExchangeOutcome(unfinished=True)],
    )


def test_who_knows_some_of_a_large_group_says_how_many_and_how_fast_all_are() -> None:
    result, _ = settled(members=300)
    assert (result.group, result.samples_per_sec) == (300, 300 * 6.0)


@pytest.mark.parametrize(
    ("tried", "standing", "sent"),
    [(False, "tried", 64.0), (True, "tried", 0.0), (True, "differs", 0.0), (True, "counts", 64.0)],
)
def test_what_a_peer_with_other_libraries_learns_waits_until_it_counts(tried: bool, standing: str, sent: float) -> None:
    given = OwnPart(torch.ones(4), (64.0,), torch.ones(4), sound=True)
    common: Any = SimpleNamespace(num_parameters=4, give=lambda samples, codec: given)
    averager: Any = SimpleNamespace(client_mode=True, standing=standing)
    link: Any = SimpleNamespace(sent=tuple, load=SimpleNamespace(codec="8bit"))
    averaging = Averaging(averager, averager, common, load("hivemind").config.collaborative, link)
    averaging.tried = tried
    averaging.exchange(samples=64, trained=1.0, next_round=3)
    assert averaging.under_way is not None
    assert (averaging.under_way.sent, averaging.under_way.given.weights) == ((sent,), (64.0,))


@pytest.mark.parametrize(("role", "used"), [("reducer", "nothing"), ("owner", "average")])
def test_what_the_owner_has_averaged_is_not_for_others_to_judge(role: str, used: str) -> None:
    assert settled(role=role, average=8.0)[0].used == used


def test_a_pseudo_gradient_is_of_use_to_whoever_has_drifted() -> None:
    result, stepped = settled(drifted=True)
    assert (result.used, result.drifted, stepped) == ("average", True, [(True,)])


# What becomes of an average that makes the model worse: at the owner's, and at those who have used it.

CONFIG = load("hivemind", [*QUICK, "data.workers=0"]).config
CPU = Distributed(RankEnv.single(), torch.device("cpu"))
OWNER = Member("owner", "owner", "owner", 0, "", b"")


class Owner:
    """The creator of a swarm of anna, ben, mallory and itself, a round after it has begun; all of them are honest."""

    def __init__(self, seconds: float = 60.0, width: int = 32) -> None:
        splits = build_data(CONFIG.data)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.state = build(alone(CONFIG), CPU, splits, model=model)
        self.common = OuterState(model, lr=0.7, momentum=0.0)
        link: Any = SimpleNamespace(learn=lambda sent, outcome: "", upload=None)
        dht: Any = SimpleNamespace(member=lambda peer: OWNER if peer == "owner" else None)
        averager: Any = SimpleNamespace(client_mode=False, peer_id="owner", lock_averaged_tensors=threading.Lock())
        self.sent: dict[str, Tensor] = {}
        self.noted = list[int]()
        averager.note_used = lambda: self.noted.append(self.common.round)
        averager.alone = lambda peer: self.mean({name: self.sent[name] for name in ("owner", peer)})
        self.averaging = Averaging(averager, dht, self.common, CONFIG.collaborative, link)
        self.averaging.trial = self.trial = AverageTrial(self.state, self.common, seconds)
        optimizer, train = torch.optim.AdamW(model.parameters(), 1e-2), splits.train
        assert isinstance(train, TensorSamples)
        for number in range(2):
            for batch in torch.randperm(len(train), generator=torch.Generator().manual_seed(number)).split(64):
                cross_entropy(model(self.state.normalized(train.images[batch])), train.labels[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
            self.given = self.common.give(640)
            everything = (True,) * len(self.given.weights)
            self.average = Average(self.given.vector, number + 1, everything, everything)
            if number == 0:
                self.common.step(self.average, self.given)
        self.sent = dict.fromkeys(("owner", "anna", "ben", "mallory"), self.given.vector)

    def mean(self, sent: Mapping[str, Tensor]) -> Tensor:
        return torch.stack(
            [vector for vector in sent.values() if float(vector[: self.common.num_parameters].norm())]
        ).mean(0)

    def settled(self, *, turned: float = 1.0, trains: bool = True, by_bob: float = 1.0) -> Round:
        """A round of what all have trained, with mallory's so many times as long; and the second part of the average,
        if there is one, which bob has made."""
        given = self.given if trains else replace(self.common.nothing(), sound=True)
        self.sent |= {"owner": given.vector, "mallory": turned * self.given.vector}
        average, parts = self.mean(self.sent), len(given.weights)
        average[PART : self.common.num_parameters] *= by_bob
        self.averaging.averager._averaged_tensors = [average]
        reducers = ("owner", "bob")[:parts]
        outcome = ExchangeOutcome((4,) * parts, (4,) * parts, (True,) * parts, reducers)
        averaged = Averaged(dict.fromkeys(self.sent, 80.0), False, outcome)
        return settle(self.averaging, given, averaged, next_round=self.common.round + 1, leads=True)


@pytest.mark.parametrize(
    ("turned", "trains", "used"), [(1, True, "average"), (-12, True, "own"), (-12, False, "nothing")]
)
def test_an_average_that_does_harm_is_refused_and_its_author_named(turned: float, trains: bool, used: str) -> None:
    owner = Owner()
    theta = owner.common.stepped(owner.average) if used != "nothing" else owner.common.theta.clone()
    result = owner.settled(turned=turned, trains=trains)
    assert (result.used, result.refused, owner.common.round) == (used, used != "average", 2)
    assert owner.noted == [1] * (used == "average")  # only what was used is ever taken back
    assert torch.allclose(owner.common.theta, theta, atol=1e-6)
    named = None if result.harmful is None else [(verdict.peer, verdict.action) for verdict in result.harmful]
    assert named == (None if used == "average" else [("mallory", "dropped")])
    assert result.why.startswith("by it the loss of 269 validation samples goes from 0." if named else "")


@pytest.mark.parametrize(("turned", "failed", "apart"), [(1, "", -10), (-12, "", 2), (1, "no others", 2)])
def test_that_the_owner_went_its_own_way_is_not_held_against_others(turned: float, failed: str, apart: int) -> None:
    owner = Owner()
    if failed:
        owner.averaging._await = lambda *_: (_NOBODY, None, failed)  # type: ignore[method-assign]
    owner.settled(turned=turned)
    assert owner.common.apart == apart


@pytest.mark.parametrize(("by_bob", "named"), [(1.0, None), (-12.0, ["bob"])])
def test_a_reducer_by_whose_part_alone_the_loss_rises_is_named(by_bob: float, named: list[str] | None) -> None:
    owner = Owner(width=1024)
    owner.averaging._audit = lambda *_: ()  # type: ignore[method-assign]  # as if it were as long as others
    result = owner.settled(by_bob=by_bob)
    assert (None if result.harmful is None else [verdict.peer for verdict in result.harmful]) == named
    assert result.refused == bool(named)


def test_what_somebody_has_put_into_the_weights_is_taken_out_at_the_owners() -> None:
    owner, harm = Owner(), torch.ones(Owner().common.num_parameters)
    theta, known = owner.common.theta.clone(), {"mallory": harm}
    owner.averaging.averager.taken_back = known.get
    assert owner.averaging.undo(["ann", "mallory"])
    assert not owner.averaging.undo(["ann"])
    assert torch.allclose(owner.common.theta[: len(harm)] - theta[: len(harm)], owner.common.lr * harm, atol=1e-6)
    owner.averaging.trial = None  # as at anybody else's
    assert not owner.averaging.undo(["mallory"])
    assert torch.allclose(owner.common.theta[: len(harm)] - theta[: len(harm)], owner.common.lr * harm, atol=1e-6)


def test_all_have_the_owners_weights_again_before_anybody_is_named() -> None:
    """They have used what the owner has refused, find that out when they next meet, and take over its state."""
    owner, other = Owner(), Owner().common
    rounds = [owner.settled(turned=-12, trains=False) for _ in range(3)]
    assert [one.refused for one in rounds] == [True, True, True]
    assert [one.harmful is None for one in rounds] == [False, True, False]
    used = Average(owner.mean(owner.sent), owner.common.round, owner.average.arrived, owner.average.counted)
    for is_stray in (True, False):
        if is_stray:
            other.step(used, owner.given)
        else:
            other.load(owner.common.theta, owner.common.momentum, owner.common.round)
        probe, owners = (one.probe().numpy().tobytes() for one in (other, owner.common))
        assert has_drifted(probe, {"owner": owners}, lambda peer: OWNER, role="volunteer", own_id="anna") is is_stray


def test_training_that_makes_the_model_worse_is_nobodys_lie() -> None:
    """A rate that is too high, or begins anew, does so to the owner, too, and without it to most of the others."""
    owner = Owner()
    worse = replace(owner.average, vector=-12 * owner.given.vector)
    assert owner.trial.harm(worse, owner.average)
    assert not owner.trial.harm(worse, worse)
    owner.sent |= dict.fromkeys(("anna", "ben"), worse.vector)
    assert owner.settled(turned=-12, trains=False).used == "average"


def test_nobody_is_named_for_running_statistics_which_are_medians_of_all() -> None:
    owner = Owner()
    spoiled = owner.given.vector.clone()
    spoiled[owner.common.num_parameters :] = 1e3
    owner.sent |= dict.fromkeys(("anna", "ben"), spoiled)
    assert owner.settled().harmful == ()


def test_samples_are_as_many_as_there_is_time_for_and_the_model_stays() -> None:
    owner = Owner(seconds=1e-9)
    before = [tensor.clone() for tensor in owner.state.model.state_dict().values()]
    assert "of 64 validation samples" in owner.trial.harm(
        replace(owner.average, vector=-12 * owner.given.vector), owner.average
    )
    assert all(map(torch.equal, before, owner.state.model.state_dict().values()))
    assert owner.state.model.training
