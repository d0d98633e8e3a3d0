"""What becomes of an average that makes the model worse: at the owner's, and at those who have used it."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.rank_functions import QUICK
from tests.swarm.test_average import settle
from trainkit.config.loading import load
from trainkit.data import build_data
from trainkit.data.loader import TensorSamples
from trainkit.distributed.process_group import Distributed
from trainkit.ranks import RankEnv
from trainkit.swarm.admission import Member
from trainkit.swarm.average import Averaging, Trial
from trainkit.swarm.averager import Averaged
from trainkit.swarm.robust import Round, has_drifted
from trainkit.swarm.sync import PART, Average, Outcome, OuterState
from trainkit.training.build import alone, build

pytestmark = pytest.mark.usefixtures("hivemind_here")

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
        self.averaging.trial = self.trial = Trial(self.state, self.common, seconds)
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
        given = self.given if trains else self.common.nothing(sound=True)
        self.sent |= {"owner": given.vector, "mallory": turned * self.given.vector}
        average, parts = self.mean(self.sent), len(given.weights)
        average[PART : self.common.num_parameters] *= by_bob
        self.averaging.averager._averaged_tensors = [average]
        reducers = ("owner", "bob")[:parts]
        outcome = Outcome((4,) * parts, (4,) * parts, (True,) * parts, reducers)
        averaged = Averaged(dict.fromkeys(self.sent, 80.0), False, outcome)
        return settle(self.averaging, given, averaged, next_round=self.common.round + 1, leads=True)


@pytest.mark.parametrize(
    ("turned", "trains", "used"), [(1, True, "average"), (-12, True, "own"), (-12, False, "nothing")]
)
def test_an_average_that_does_harm_is_refused_and_its_author_named(turned: float, trains: bool, used: str) -> None:
    owner = Owner()
    theta = owner.common.stepped(owner.average)[0] if used != "nothing" else owner.common.theta.clone()
    result = owner.settled(turned=turned, trains=trains)
    assert (result.used, result.refused, owner.common.round) == (used, used != "average", 2)
    assert owner.noted == [1] * (used == "average")  # only what was used is ever taken back
    assert torch.allclose(owner.common.theta, theta, atol=1e-6)
    named = None if result.harmful is None else [(verdict.peer, verdict.action) for verdict in result.harmful]
    assert named == (None if used == "average" else [("mallory", "dropped")])
    assert result.why.startswith("by it the loss of 269 validation samples goes from 0." if named else "")


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
    owner.averaging.undo(["ann", "mallory"])
    assert torch.allclose(owner.common.theta[: len(harm)] - theta[: len(harm)], owner.common.lr * harm, atol=1e-6)
    owner.averaging.trial = None  # as at anybody else's
    owner.averaging.undo(["mallory"])
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
