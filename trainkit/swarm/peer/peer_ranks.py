"""The ranks of one peer: rank 0 speaks, the others follow."""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as c10d
from torch import nn

from trainkit.common.errors import RunFailedError
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data.base import Batch, Splits
from trainkit.data.loader import Batches
from trainkit.data.order import derive_seed
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.strategies.base import AsItIs
from trainkit.models.library import build_model
from trainkit.swarm.peer.same_run import load_text
from trainkit.swarm.protocol.outer_step import OuterState, unflattened
from trainkit.training.batch_size import check_batch_sizes
from trainkit.training.tasks.meter import Meter
from trainkit.training.train_state import TrainState, alone, build
from trainkit.training.update import Updater

_FOREVER = 1 << 40
# What rank 0 tells the others: one of these, an integer (the batch to load from, a seed) and a learning rate.
Order = Literal["leave", "begin", "take weights", "update", "read meter"]


@dataclass
class PeerRanks:
    """Rank 0's hand on the others; of a peer with one rank, nobody's."""

    state: TrainState
    """Model that trains: spread over the ranks."""
    judge: TrainState
    """The same model for rank 0 alone, which validates and saves while the others wait."""
    common: OuterState
    _seen: int = field(default=-1, init=False)
    """Version of the weights that all have."""

    def batches(self, seed: int, position: int) -> Batches[Batch]:
        """This rank's batches, from global batch ``position`` on; the others load theirs."""
        self.order("begin", position)
        return self.state.batches(position, _FOREVER, seed=seed)

    def before_update(self, lr: float, seed: int) -> None:
        """Tell the others to make the update that this rank makes next."""
        if self.state.dist.world_size > 1 and self._seen != self.common.version:
            self.order("take weights")
            _share_weights(self.judge.model)
            self._seen = self.common.version
        self.order("update", seed, lr)

    def read(self, meter: Meter) -> dict[str, float]:
        """Return what has been measured on all ranks."""
        self.order("read meter")
        return meter.read()

    def order(self, what: Order, number: int = 0, rate: float = 0.0) -> None:
        """Tell the other ranks, if there are any."""
        self.state.dist.broadcast_json((what, number, rate))


def data_seed(config: Config, peer_id: str) -> int:
    """Every peer has a data order of its own, so that together they see more than each alone."""
    return derive_seed(config.seed, int(hashlib.sha256(peer_id.encode()).hexdigest(), 16))


@contextmanager
def together(size: int) -> Iterator[None]:
    """Say in words that another rank has died, which c10d tells by the text of a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if size == 1 or not re.search("gloo|NCCL|ProcessGroup|onnection", str(error)):
            raise
        why = f"{str(error).strip().splitlines()[0][:200]}."
        fix = "See the other ranks' logs; most often memory ran out. The swarm continues without this peer."
        raise RunFailedError("A rank of this peer has died.", why=why, fix=fix) from None


@contextmanager
def spread(config: Config, dist: Distributed, splits: Splits, common: OuterState, identity: str) -> Iterator[PeerRanks]:
    """Rank 0's part: the others are told what is trained, and at the end to leave.

    Args:
        identity: what makes this peer's data order its own.

    Raises UserError when a global batch cannot be divided among the ranks.
    """
    if dist.world_size == 1:
        state = build(alone(config), dist, splits, model=common.model)
        yield PeerRanks(state, state, common)
        return
    check_batch_sizes(config, dist.world_size, splits)
    dist.broadcast_json((to_yaml(config), identity))
    state = build(_as_ddp(config), dist, splits, model=common.model)
    solo = Distributed(replace(dist.env, rank=0, world_size=1), dist.device)
    judge = replace(state, config=alone(config), dist=solo, model=common.model, strategy=AsItIs())
    team = PeerRanks(state, judge, common)
    try:
        yield team
    finally:
        with suppress(RuntimeError):  # a rank that has died does not hear it
            team.order("leave")


def follow(dist: Distributed, *, beat: Callable[[], None] = lambda: None) -> nn.Module:
    """Any other rank: do what rank 0 says, until it says that this is all. The model that it has trained.

    Raises RunFailedError when rank 0 has died.
    """
    with together(dist.world_size), ExitStack() as loading:
        settings, identity = dist.broadcast_json(("", ""))
        # Rank 0, who knows the secret, has asked whether its code may be run.
        config = load_text(settings).config
        splits = build_data(config.data)
        model = build_model(config.model, splits.info, config.seed)
        state = build(_as_ddp(config), dist, splits, model=model)
        seed = data_seed(config, identity)
        updater = Updater(state, beat=beat)
        batches: Iterator[Batch] = iter(())
        while True:
            what, number, rate = dist.broadcast_json(("", 0, 0.0))
            if what == "leave":
                return model
            beat()
            if what == "begin":
                loading.close()
                batches = loading.enter_context(state.batches(number, _FOREVER, seed=seed))
                updater = Updater(state, beat=beat)
                state.model.train()
            elif what == "take weights":
                _share_weights(model)
            elif what == "update":
                updater(batches, lr=rate, seed=number)
            elif what == "read meter":
                updater.meter.read()


def _as_ddp(config: Config) -> Config:
    return config.model_copy(update={"strategy": type(config.strategy)(name="ddp")})


@torch.no_grad()
def _share_weights(model: nn.Module) -> None:
    """Rank 0's weights and buffers, bit for bit, in the model of every rank."""
    tensors = [*model.parameters(), *model.buffers()]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        sent = torch.cat([tensor.reshape(-1) for tensor in same])
        c10d.broadcast(sent, src=0)
        for tensor, part in unflattened(sent, same):
            tensor.copy_(part)
