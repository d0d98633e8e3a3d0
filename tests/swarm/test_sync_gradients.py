"""What peers have in common that average gradients; the averaging itself is done by hand here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

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
from trainkit.swarm.sync_diloco import Average
from trainkit.swarm.sync_gradients import GatheringParts, GradientState
from trainkit.swarm.team import data_seed
from trainkit.training.build import alone, build
from trainkit.training.update import Updater

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


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


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
