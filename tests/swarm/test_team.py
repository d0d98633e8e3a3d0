"""A peer of several ranks, without a swarm around it: what rank 0 says, the others do."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.rank_functions import QUICK, run_ranks
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.distributed.process_group import distributed
from trainkit.errors import UserError
from trainkit.models import build_model
from trainkit.ranks import RankEnv
from trainkit.swarm import session
from trainkit.swarm.sync import Average, OuterState
from trainkit.training.update import Updater

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def settings(*overrides: str) -> Config:
    return load("hivemind", [*QUICK, "train.global_batch_size=32", "data.workers=0", *overrides]).config


def digest(model: nn.Module) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def rank(env: RankEnv, overrides: tuple[str, ...], die: int = -1) -> dict[str, Any]:
    """Two rounds of a peer; what each rank has at their end. ``die``: the rank that is killed in the second."""
    with distributed(env, use_gpu=False, collective_timeout=session.PATIENCE) as dist:
        if not env.is_main:
            beats = [0]

            def beat() -> None:
                beats[0] += 1
                if die == env.rank and beats[0] > 12:
                    os.kill(os.getpid(), signal.SIGKILL)

            return {"weights": digest(session.follow(dist, beat=beat))}
        config = settings(*overrides)
        splits = build_data(config.data)
        model = build_model(config.model, splits.info, config.seed + 1)  # which must come over the others' own
        common = OuterState(model, lr=0.7, momentum=0.9)
        found: dict[str, Any] = {}
        with (
            session.spread(config, dist, splits, common, "QmPeer") as peer,
            peer.batches(session.data_seed(config, "QmPeer"), 0) as batches,
        ):
            update = Updater(peer.parts)
            for number in range(2):
                for step in range(3):
                    peer.before_update(1e-3, 10 * number + step)
                    with session.together(peer.size):
                        update(batches, lr=1e-3, seed=10 * number + step)
                found["samples"] = peer.read(update.meter)["samples"]
                given = common.give(8)
                found[f"moved {number}"] = float(given.moved.norm())
                everything = [True] * len(given.weights)
                common.step(Average(given.vector, number + 1, everything, everything), given)
            peer.before_update(0.0, 99)  # after which all have the weights of the round's end
            update(batches, lr=0.0, seed=99)
        return {**found, "weights": digest(model), "theta": common.theta.tolist()}


def test_all_ranks_agree_bit_for_bit_and_all_their_samples_count() -> None:
    first, second = run_ranks(2, rank, ("optim.weight_decay=0",))
    assert first["weights"] == second["weights"]
    assert first["samples"] == 3 * 32
    (alone,) = run_ranks(1, rank, ("optim.weight_decay=0",))
    assert alone["samples"] == 3 * 32
    assert first["moved 1"] == pytest.approx(alone["moved 1"], rel=1e-3)
    torch.testing.assert_close(torch.tensor(first["theta"]), torch.tensor(alone["theta"]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "ranks", "says"),
    [
        (("train.global_batch_size=33",), 2, "An update of 33 samples cannot be divided among the 2 ranks"),
        (("train.micro_batch_size=32",), 2, "They need micro batches of 32 each"),
    ],
)
def test_an_update_that_cannot_be_divided_is_refused(overrides: tuple[str, ...], ranks: int, says: str) -> None:
    with pytest.raises(UserError, match="divided") as error:
        session._check_batch(settings(*overrides), ranks)
    assert says in str(error.value)


def test_a_rank_that_dies_ends_the_peer_at_once_and_in_words() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="A rank of this peer has died"):
        run_ranks(2, rank, (), 1)
    assert time.monotonic() - began < 60
