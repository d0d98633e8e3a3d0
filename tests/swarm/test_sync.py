"""What peers have in common that average gradients; the averaging itself is done by hand here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.rank_functions import QUICK
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Batch
from trainkit.data.loader import Batches, train_batches
from trainkit.distributed.process_group import Distributed
from trainkit.models import build_model
from trainkit.ranks import RankEnv
from trainkit.swarm.link import PART
from trainkit.swarm.session import data_seed
from trainkit.swarm.sync import Average, GatheringParts, Given, GradientState, OuterState
from trainkit.training.build import alone, build
from trainkit.training.update import Updater


def state(*, lr: float = 1.0, momentum: float = 0.0) -> tuple[nn.Module, OuterState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, OuterState(model, lr=lr, momentum=momentum)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def common(outer: OuterState) -> Tensor:
    """The weights that the peers have in common."""
    return outer.theta[: outer.num_parameters].clone()


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def step(
    outer: OuterState,
    vector: Tensor,
    given: Given,
    *,
    arrived: Sequence[bool] = (),
    counted: Sequence[bool] = (),
    trained_on: bool = False,
) -> None:
    """Make the outer step, by default with everything in it."""
    everything = [True] * len(given.weights)
    average = Average(vector, outer.round + 1, arrived or everything, counted or everything)
    outer.step(average, given, trained_on=trained_on)


def test_alone_with_lr_1_and_no_momentum_the_peer_keeps_what_it_has_learned() -> None:
    model, outer = state()
    move(model, 0.5)
    learned, given = flat(model), outer.give(8)
    # It points back to where the round began.
    assert torch.allclose(given.vector[: outer.num_parameters], torch.tensor(-0.5))
    step(outer, given.vector, given)
    assert torch.allclose(flat(model), learned)


def test_the_outer_step_is_sgd_with_nesterov_momentum() -> None:
    model, outer = state(lr=0.7, momentum=0.9)
    reference = common(outer).requires_grad_()
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(3):
        move(model, 0.1 * (number + 1))
        given = outer.give(8)
        reference.grad = given.vector[: outer.num_parameters].clone()
        sgd.step()
        step(outer, given.vector, given)
        assert torch.allclose(common(outer), reference.detach(), atol=1e-6)


def test_what_is_not_finite_has_no_say_and_the_model_starts_anew() -> None:
    model, outer = state()
    before = outer.theta.clone()
    move(model, math.nan)
    given = outer.give(8)
    assert (given.usable, set(given.weights), float(given.vector[: outer.num_parameters].norm())) == (False, {0.0}, 0.0)
    step(outer, given.vector, given)
    assert torch.equal(outer.theta, before)
    assert torch.equal(flat(model), common(outer))


def test_a_late_average_keeps_what_was_learned_since() -> None:
    (model, outer), (in_time, same) = state(lr=0.7, momentum=0.9), state(lr=0.7, momentum=0.9)
    for one in (model, in_time):
        move(one, 0.5)
    given, average = outer.give(8), torch.full_like(outer.theta, -0.3)
    step(same, average, same.give(8))
    move(model, 0.01)  # it trains on
    step(outer, average, given, trained_on=True)
    assert torch.equal(outer.theta, same.theta)
    assert torch.equal(outer.momentum, same.momentum)
    assert torch.allclose(flat(model), flat(in_time) + 0.01, atol=1e-6)
    # Only that is the next round's.
    assert torch.allclose(outer.give(8).vector[: outer.num_parameters], torch.tensor(-0.01), atol=1e-6)


@pytest.mark.parametrize("trained_on", [False, True])
def test_what_was_not_counted_is_in_the_mean_of_a_later_contribution(trained_on: bool) -> None:
    """With the samples of both rounds."""
    model, outer = state()
    move(model, 0.5)
    others = torch.full_like(outer.theta, 0.2)
    step(outer, others, outer.give(8), counted=[False], trained_on=trained_on)
    assert torch.allclose(flat(model), common(outer) + 0.5, atol=1e-6)  # it has followed the others, and keeps its own
    move(model, 0.3)
    given = outer.give(4)
    assert given.weights == (12.0,)
    assert torch.allclose(given.vector[: outer.num_parameters], torch.tensor(-0.4), atol=1e-6)
    step(outer, others, given, trained_on=trained_on)
    assert torch.allclose(flat(model), common(outer), atol=1e-6)
    move(model, 0.1)
    assert outer.give(4).weights == (4.0,)


def test_where_nothing_has_arrived_common_weights_and_momentum_stay() -> None:
    model = nn.Linear(PART // 64, 128, bias=False)  # two parts
    outer = OuterState(model, lr=1.0, momentum=0.9)
    before = outer.theta.clone()
    step(outer, torch.ones_like(outer.theta), outer.give(8), arrived=[False, True])
    assert torch.equal(outer.theta[:PART], before[:PART])
    assert float(outer.momentum[:PART].norm()) == 0.0
    assert not torch.equal(outer.theta[PART:], before[PART:])
    before = outer.theta.clone()
    step(outer, torch.ones_like(outer.theta), outer.give(0), arrived=[False, False], counted=[False, False])
    assert torch.equal(outer.theta, before)
    assert outer.round == 2


def test_the_model_as_the_peers_have_it_in_common_is_lent_and_given_back() -> None:
    model, outer = state()
    move(model, 0.5)
    own = flat(model)
    with outer.in_model():
        assert torch.equal(flat(model), common(outer))
    assert torch.equal(flat(model), own)


def test_running_statistics_are_averaged_as_they_are() -> None:
    model, outer = state()
    mean, variance = model.get_buffer("1.running_mean"), model.get_buffer("1.running_var")
    model(torch.randn(64, 4))
    given = outer.give(8)
    assert torch.allclose(given.vector[outer.num_parameters : outer.num_parameters + 3], mean)
    given.vector[outer.num_parameters :] = 2.0
    step(outer, given.vector, given)
    assert torch.equal(variance, torch.full((3,), 2.0))


def test_running_statistics_of_a_model_that_has_trained_on_are_its_own() -> None:
    model, outer = state()
    mean, given = model.get_buffer("1.running_mean"), outer.give(8)
    model(torch.randn(64, 4))
    own = mean.clone()
    step(outer, torch.zeros_like(outer.theta), given, trained_on=True)
    assert torch.equal(mean, own)
    assert torch.equal(outer.theta[outer.num_parameters : outer.num_parameters + 3], torch.zeros(3))


def test_another_peers_state_is_taken_over_whole() -> None:
    (_, donor), (model, outer) = state(), state()
    donor.theta += 1.0
    donor.momentum += 2.0
    outer.load(donor.theta, donor.momentum, 4)
    assert torch.equal(outer.theta, donor.theta)
    assert torch.equal(outer.momentum, donor.momentum)
    assert outer.round == 4
    assert torch.equal(flat(model), common(donor))


@pytest.mark.parametrize("broken", ["weights instead of", "momentum: weights instead of", "not finite"])
def test_a_state_that_does_not_fit_or_is_not_finite_changes_nothing(broken: str) -> None:
    """One of another model, of another optimizer, of a model that has diverged."""
    _, outer = state()
    before = outer.theta.clone()
    theta = {"weights instead of": before[:-1], "not finite": before * math.nan}.get(broken, before)
    momentum = outer.momentum[:-1] if "momentum" in broken else outer.momentum
    with pytest.raises(ValueError, match=broken.removeprefix("momentum: ")):
        outer.load(theta, momentum, 1)
    assert torch.equal(outer.theta, before)


def test_peers_with_the_same_weights_have_the_same_probe_and_no_others() -> None:
    """Weights that differ anywhere have another one in every round."""
    from trainkit.swarm.robust import has_drifted

    probes = [state()[1].probe() for _ in range(3)]
    assert all(torch.equal(first, second) for first, second in pairwise(probes))
    for place in range(0, state()[1].theta.numel(), 97):
        ours, theirs = state()[1], state()[1]
        theirs.theta[place] += 0.1 * float(theirs.theta.norm())
        for ours.round in (0, 5):
            theirs.round = ours.round
            assert has_drifted(theirs.probe().numpy().tobytes(), ours.probe())


pytestmark = pytest.mark.usefixtures("one_thread")

MICRO, PEERS, ROUNDS = 16, 2, 6
CPU = Distributed(RankEnv.single(), torch.device("cpu"))


def settings(*overrides: str) -> Config:
    quick = [
        *QUICK,
        "data.workers=0",
        f"train.micro_batch_size={MICRO}",
        f"train.global_batch_size={PEERS * 2 * MICRO}",
    ]
    return load("hivemind_gradients", [*quick, f"collaborative.rounds={ROUNDS}", *overrides]).config


@dataclass
class Peer:
    """One that trains, without a swarm around it."""

    common: GradientState
    update: Updater
    batches: Iterator[Batch]
    used: list[Batch]

    def gather(self, times: int = 2) -> None:
        for _ in range(times):
            self.used.append(next(self.batches))
            self.update(iter(self.used[-1:]), lr=0.0, seed=1)


@pytest.fixture
def peers(request: pytest.FixtureRequest) -> Iterator[list[Peer]]:
    config = settings(*getattr(request, "param", ()))
    splits = build_data(config.data)
    with ExitStack() as held:
        made = []
        for name in ("one", "two"):
            common = GradientState(build_model(config.model, splits.info, config.seed), config)
            parts = GatheringParts.of(build(alone(config), CPU, splits, model=common.model), common.gathered)
            batches: Batches[Batch] = train_batches(
                parts.splits,
                seed=data_seed(config, name),
                start_step=0,
                stop_step=1000,
                global_batch_size=MICRO,
                micro_batch_size=MICRO,
                rank=0,
                world_size=1,
                workers=0,
            )
            parts.model.train()
            made.append(Peer(common, Updater(parts), held.enter_context(batches), []))
        yield made


def agree(peers: list[Peer]) -> list[Tensor]:
    """All exchange and update, as `exchange` averages: by samples. The weights of each afterwards."""
    given = [peer.common.give(peer.common.samples) for peer in peers]
    weights = torch.tensor([one.weights[0] for one in given])
    average = sum(one.vector * weight for one, weight in zip(given, weights, strict=True)) / weights.sum()
    assert isinstance(average, Tensor)
    for peer, one in zip(peers, given, strict=True):
        everything = [True] * len(one.weights)
        peer.common.step(Average(average.clone(), peer.common.round + 1, everything, everything), one)
    return [peer.common.theta.clone() for peer in peers]


CASES = [
    (),
    ("train.grad_clip_norm=0.3",),
    ("optim.name=sgd", "optim.lr=0.1"),
    ("optim.name=lamb",),
    ("optim.name=muon",),
]


@pytest.mark.parametrize("peers", CASES, indirect=True, ids=lambda case: " ".join(case) or "adamw")
def test_two_peers_make_the_updates_of_one_process(peers: list[Peer]) -> None:
    """The loss of every update within 1e-4, and the weights within 1e-4 of their length: float32 adds up in another
    order. Muon makes its directions in bfloat16, where that shows sooner: 1.2e-4 on a CPU with AMX."""
    (one, two), config = peers, peers[0].common._config
    splits = build_data(config.data)
    single = build(alone(config), CPU, splits, model=build_model(config.model, splits.info, config.seed))
    update = Updater(single)
    single.model.train()
    for _ in range(ROUNDS):
        lr = one.common.lr
        for peer in peers:
            peer.gather()
        losses = [peer.update.meter.read()["loss"] for peer in peers]
        first, second = agree(peers)
        assert torch.equal(first, second)
        assert torch.equal(one.common.momentum, two.common.momentum)
        made = update(iter([*one.used[-2:], *two.used[-2:]]), lr=lr, seed=1)
        assert sum(losses) / PEERS == pytest.approx(float(made.loss), abs=1e-4)
    expected = flat(single.model)
    within = 1e-3 if config.optim.name == "muon" else 1e-4
    assert float((flat(one.common.model) - expected).norm() / expected.norm()) < within


def test_a_peer_that_has_gathered_more_counts_for_more(peers: list[Peer]) -> None:
    one, two = peers
    one.gather(3)
    two.gather(1)
    first, second = one.common.give(one.common.samples), two.common.give(two.common.samples)
    assert (set(first.weights), set(second.weights)) == ({3.0 * MICRO}, {1.0 * MICRO})


def test_a_round_that_fails_keeps_weights_and_gradients(peers: list[Peer]) -> None:
    """hivemind 1.1.12 makes an update from zeros."""
    common = peers[0].common
    peers[0].gather()
    before, given = common.theta.clone(), common.give(common.samples)
    nothing = [False] * len(given.weights)
    common.step(Average(given.vector, common.round + 1, nothing, nothing), given)
    assert (common.round, common.samples) == (0, 2 * MICRO)
    assert torch.equal(common.theta, before)
    assert torch.equal(common.give(common.samples).vector, given.vector)


def test_what_one_peer_has_gathered_is_gone_once_an_average_is_used(peers: list[Peer]) -> None:
    peers[0].gather()
    agree(peers)  # the other one has nothing to give, and makes the same update
    assert [peer.common.samples for peer in peers] == [0, 0]
    assert torch.equal(flat(peers[0].common.model), flat(peers[1].common.model))


@pytest.mark.parametrize("peers", CASES[:1] + CASES[2:], indirect=True, ids=lambda case: " ".join(case) or "adamw")
def test_a_newcomer_goes_on_from_the_state_that_it_is_given_bit_for_bit(peers: list[Peer]) -> None:
    veteran, newcomer = peers
    for _ in range(3):
        veteran.gather()
        agree([veteran])
    newcomer.gather()
    round_index, theta, momentum = veteran.common.copy()
    newcomer.common.load(theta, momentum, round_index)
    assert newcomer.common.samples == 0  # what it has gathered belongs to other weights
    assert newcomer.common.lr == veteran.common.lr
    for _ in range(2):
        veteran.gather()
        first, second = agree(peers)
        assert torch.equal(first, second)
    assert torch.equal(flat(newcomer.common.model), flat(veteran.common.model))


def test_gradients_that_are_not_finite_are_never_gathered(peers: list[Peer]) -> None:
    peer = peers[0]
    batch = next(peer.batches)
    spoilt = batch._replace(images=batch.images.float() * float("nan"))
    made = peer.update(iter([spoilt]), lr=0.0, seed=1)
    assert made.stepped.nonfinite.item() == 1.0
    assert peer.common.samples == 0


def test_the_rate_is_that_of_one_machine_with_as_many_updates() -> None:
    config = settings("collaborative.rounds=10", "train.epochs=5")
    common = GradientState(nn.Linear(2, 2), config)
    rates = []
    for index in range(10):
        common.round = index
        rates.append(common.lr)
    assert max(rates) == pytest.approx(config.optim.lr)
    assert rates.index(max(rates)) == 1  # warm-up of one epoch of two updates
    assert rates[-1] < 1e-3 * config.optim.lr
