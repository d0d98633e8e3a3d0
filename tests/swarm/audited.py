"""A small swarm of an owner and a volunteer that may cheat, for tests of audits by replay."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.rank_functions import QUICK
from trainkit.checkpoint.state import weights_of
from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data.order import derive_seed
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import Distributed
from trainkit.swarm.protocol.codecs import Codec, cuts, decode, encode
from trainkit.swarm.protocol.outer_step import Average, OuterState, OwnPart, flatten
from trainkit.swarm.trust.accounts import Account, Journal, Shown
from trainkit.swarm.trust.auditor import Accounts, Auditor
from trainkit.swarm.trust.screening import Verdict
from trainkit.training.train_state import TrainState, alone, build
from trainkit.training.update import Updater

CONFIG = load("hivemind", [*QUICK, "data.workers=0", "train.precision=fp32", "train.global_batch_size=32"]).config
CPU = Distributed(RankEnv.single(), torch.device("cpu"))
SPLITS = build_data(CONFIG.data)
RATE, SEED = 3e-3, 7
NOTHING = hashlib.sha256().hexdigest()


TRUE = "true, as was seen in "
OTHERWISE = "has shown something else than it had committed to"
NOT_TRAINED = "has sent something else than it has trained (cosine "


def made(config: Config, codec: Codec, width: int = 32) -> tuple[TrainState, OuterState]:
    torch.manual_seed(0)
    norm = nn.LayerNorm(width) if codec == "4bit" else nn.BatchNorm1d(width)  # whose statistics are never sent in 4 bit
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), norm, nn.ReLU(), nn.Linear(width, 10))
    return build(alone(config), CPU, SPLITS, model=model), OuterState(model, lr=0.7, momentum=0.5)


class Swarm:
    """The owner and one volunteer, ben, whose clock goes by the updates: it takes a snapshot after every eighth."""

    def __init__(
        self,
        *,
        precision: str = "fp32",
        micro_batch_size: int = 32,
        seconds: float = 8.0,
        codec: Codec = "8bit",
        is_slow: bool = False,
        wide: bool = False,
    ) -> None:
        self.codec = codec
        self.is_slow = is_slow
        width = 2500 if is_slow or wide else 32  # in three parts
        settings = {"precision": precision, "micro_batch_size": micro_batch_size}
        theirs = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update=settings)})
        owner, self.owner = made(CONFIG, codec, width)
        self.state, self.common = made(theirs, codec, width)
        self.auditor = Auditor(owner, self.owner, lambda peer: SEED, lambda index: (RATE, RATE), 60.0, 1e9)
        with owner.batches(0, 1, seed=0, workers=0) as batches:
            Updater(owner)(batches, lr=RATE, seed=0)
        self.owner.into_model()
        self.accounts = Accounts(32, self.common.theta.numel())
        self.journal = Journal(self.state, self.common, seconds)
        self.update = Updater(self.state)
        self.round = 0
        self.position = 0
        self.late: tuple[Average, OwnPart] | None = None
        self.first = {name: value.clone() for name, value in weights_of(self.state.model).items()}
        # What a cheat changes.
        self.rate = RATE
        self.labels: Callable[[Tensor], Tensor] = lambda labels: labels
        self.after_update: Callable[[], None] = lambda: None

    def train(self, updates: int) -> None:
        with self.state.batches(self.position, self.position + updates, seed=SEED, workers=0) as batches:
            wanted = (batch._replace(labels=self.labels(batch.labels)) for batch in batches)
            for _ in range(updates):
                self.journal.before_update(self.position, self.rate, self.position)
                self.update(wanted, lr=self.rate, seed=derive_seed(SEED, self.position))
                self.position += 1
                self.after_update()

    def round_of(
        self,
        *,
        settles_after: int = 0,
        sent: Callable[[Tensor], Tensor] = lambda vector: vector,
        counts: bool | Sequence[bool] = True,
        arrives: bool = True,
        adopts: bool = False,
        trains: bool = True,
        drawn: str = "ben",
        shows: bool = True,
        takes_part: bool = True,
    ) -> Shown | None:
        """A round of 24 updates, of which some come before the last round's average; what the volunteer shows.

        Args:
            counts: its contribution is in the average, or some parts of it.
            arrives: the average arrives at the volunteer as well.
            adopts: the volunteer takes over the owner's weights after the last round's average.
            trains: the owner has time to train some of it again.
            drawn: whose work the owner wants to see.
            shows: what it is asked for.
            takes_part: the volunteer says something of the round.
        """
        self.state.model.train()
        if self.late is not None:
            self.train(settles_after)
            self.common.step(*self.late, trained_on=settles_after > 0)
        if adopts:
            self.train(1)
            self.common.load(self.owner.theta, self.owner.momentum, self.round)
        self.train(24 - settles_after - adopts)
        self.heard = self.accounts.heard()
        self.owes = self.auditor.owe(self.heard)
        self.auditor.draw([], self.heard)  # it keeps the common weights
        free = drawn not in self.heard.owing
        self.accounts.draw({drawn: trains} if free else {}, self.round)
        told = self.journal.close(self.round, is_slow=self.is_slow)
        given = self.common.give(24 * 32, self.codec)
        assert told is not None
        vector = sent(given.vector.clone())[: self.common.num_parameters]
        arrived = dict[int, Any]()
        for part in cuts(len(vector)):
            arrived[part.start] = decode(encode(vector[part], self.codec), self.codec, len(vector[part])).numpy()
        self.accounts.took_part(["ben"])
        wanted = None
        parts: Sequence[int] = ()
        if takes_part:
            wanted = self.accounts.hear("ben", told.account.model_dump_json().encode())
        if wanted is not None:
            parts = self.accounts.ask_for_parts("ben", arrived)
        asked = self.accounts.take("ben")
        self.round += 1
        many = len(given.weights)
        counted = (counts,) * many if isinstance(counts, bool) else tuple(counts)
        average = Average(0.5 * given.vector, self.round, (True,) * many, counted)
        self.owner.step(average, replace(self.owner.nothing(), sound=True))
        self.late = replace(average, arrived=(arrives,) * many), given
        if shows:
            self.accounts.excuse("ben")
        return asked and asked._replace(data=told.show(wanted or (), parts))

    def shown(self, **how: Any) -> Shown:
        """What the volunteer shows of the next round."""
        shown = self.round_of(**how)
        assert shown is not None
        return shown

    def verdict(self, shown: Shown) -> Verdict:
        """What the owner says of it."""
        return self.auditor.audit(shown) or Verdict("ben", "audited", "")

    def audited(self, *, precision: str = "", **how: Any) -> tuple[str, str]:
        """The owner's verdict on the next round; ``precision``: what the volunteer claims to have trained in."""
        shown = self.shown(**how)
        if precision:
            shown = shown._replace(account=shown.account.model_copy(update={"precision": precision}))
        verdict = self.auditor.audit(shown)
        if verdict is None:
            return "", ""
        return verdict.action, verdict.why


def with_sums(account: Account, change: Callable[[Tensor], Any]) -> Account:
    """That account with other sums."""
    where = account.where().float()
    change(where)
    return account.model_copy(update={"sums": base64.b64encode(where.numpy().tobytes()).decode()})


def other_labels(swarm: Swarm) -> None:
    swarm.labels = lambda labels: torch.where(labels == 7, 3, labels)


def other_rates(swarm: Swarm) -> None:
    swarm.rate = 5 * RATE


def turned(swarm: Swarm) -> None:
    """Once in a round, between two updates, the model is moved against what it has learned."""

    @torch.no_grad()
    def move() -> None:
        if swarm.position % 24 == 13:
            swarm.journal.note()
            theta = flatten(swarm.common._tensors())
            swarm.common.into_model(theta + 0.5 * (swarm.common.theta - theta))

    swarm.after_update = move


def poisoned(swarm: Swarm) -> None:
    """Once in a round the optimizer is told to remember what it has not seen."""

    def poison() -> None:
        if swarm.position % 24 == 13:
            for state in swarm.state.optimizer.state.values():
                state["exp_avg"].mul_(-1.0)

    swarm.after_update = poison


def leapt(swarm: Swarm) -> None:
    """Once in a round, between two updates, the model is moved as far as it has come in the round, but elsewhere."""
    swarm.after_update = lambda: aside(swarm, 1.0) if swarm.position % 24 == 13 else None


def crept(swarm: Swarm) -> None:
    """The same, but by a fifth of that, five times in a round."""
    swarm.after_update = lambda: aside(swarm, 0.2) if swarm.position % 24 in (5, 9, 13, 17, 21) else None


@torch.no_grad()
def aside(swarm: Swarm, share: float) -> None:
    """The model moves sideways by that share of how far it has come in the round."""
    way = (flatten(swarm.common._tensors()) - swarm.common.theta)[: swarm.common.num_parameters]
    swarm.common._move(share * way.norm() / way.numel() ** 0.5 * torch.randn(way.shape))
    swarm.common.version -= 1


def forgetful(swarm: Swarm) -> None:
    """Once in a round the optimizer forgets, and it says that the common weights have moved."""

    def forget() -> None:
        if swarm.position % 24 == 13:
            swarm.journal.note()
            swarm.state.optimizer.state.clear()
            swarm.common.version += 1

    swarm.after_update = forget


def noisy(swarm: Swarm) -> None:
    """Each update ends a little elsewhere, as by libraries that compute something else."""

    @torch.no_grad()
    def add_noise() -> None:
        for parameter in swarm.state.model.parameters():
            parameter.add_(1e-2 * torch.randn_like(parameter))

    swarm.after_update = add_noise


def half_turned(vector: Tensor) -> Tensor:
    return torch.cat([vector[: len(vector) // 2], -vector[len(vector) // 2 :]])
