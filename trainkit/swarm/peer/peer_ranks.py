"""The ranks of one peer: rank 0 speaks, the others follow."""

import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

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
_ORDER = struct.Struct("<BQd")
_LEAVE, _BEGIN, _TAKE_WEIGHTS, _UPDATE, _READ_METER = range(5)


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

    @property
    def size(self) -> int:
        """Ranks."""
        return self.state.dist.world_size

    def batches(self, seed: int, position: int) -> Batches[Batch]:
        """This rank's batches, from global batch ``position`` on; the others load theirs."""
        self.order(_BEGIN, position)
        return self.state.batches(position, _FOREVER, seed=seed)

    def before_update(self, lr: float, seed: int) -> None:
        """Tell the others to make the update that this rank makes next."""
        if self.size > 1 and self._seen != self.common.version:
            self.order(_TAKE_WEIGHTS)
            _share_weights(self.judge.model)
            self._seen = self.common.version
        self.order(_UPDATE, seed, lr)

    def read(self, meter: Meter) -> dict[str, float]:
        """Return what has been measured on all ranks."""
        self.order(_READ_METER)
        return meter.read()

    def order(self, what: int, number: int = 0, rate: float = 0.0) -> None:
        """Tell the other ranks, if there are any."""
        if self.size > 1:
            order = bytearray(_ORDER.pack(what, number, rate))
            c10d.broadcast(torch.frombuffer(order, dtype=torch.uint8), src=0)


def data_seed(config: Config, peer_id: str) -> int:
    """Every peer has a data order of its own, so that together they see more than each alone."""
    return derive_seed(config.seed, int(hashlib.sha256(peer_id.encode()).hexdigest(), 16))


@contextmanager
def together(size: int) -> Iterator[None]:
    """Say in words that another rank has died, which c10d tells by the text of a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if size == 1 or not any(word in str(error) for word in ("gloo", "NCCL", "ProcessGroup", "onnection")):
            raise
        raise RunFailedError(
            "A rank of this peer has died.",
            why=f"{str(error).strip().splitlines()[0][:200]}.",
            fix="See the other ranks' logs; most often memory ran out. The swarm continues without this peer.",
        ) from None


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
    dist.broadcast_json({"config": to_yaml(config), "identity": identity})
    state = build(_as_ddp(config), dist, splits, model=common.model)
    solo = Distributed(replace(dist.env, rank=0, world_size=1), dist.device)
    judge = replace(state, config=alone(config), dist=solo, model=common.model, strategy=AsItIs())
    team = PeerRanks(state, judge, common)
    try:
        yield team
    finally:
        with suppress(RuntimeError):  # a rank that has died does not hear it
            team.order(_LEAVE)


def follow(dist: Distributed, *, beat: Callable[[], None] = lambda: None) -> nn.Module:
    """Any other rank: do what rank 0 says, until it says that this is all. The model that it has trained.

    Raises RunFailedError when rank 0 has died.
    """
    with together(dist.world_size), ExitStack() as loading:
        told: dict[str, Any] = dist.broadcast_json({})
        # Rank 0, who knows the secret, has asked whether its code may be run.
        config = load_text(told["config"]).config
        splits = build_data(config.data)
        model = build_model(config.model, splits.info, config.seed)
        state = build(_as_ddp(config), dist, splits, model=model)
        seed = data_seed(config, told["identity"])
        updater = Updater(state, beat=beat)
        batches: Iterator[Batch] = iter(())
        order = torch.empty(_ORDER.size, dtype=torch.uint8)
        while True:
            c10d.broadcast(order, src=0)
            what, number, rate = _ORDER.unpack(order.numpy().tobytes())
            if what == _LEAVE:
                return model
            beat()
            if what == _BEGIN:
                loading.close()
                batches = loading.enter_context(state.batches(number, _FOREVER, seed=seed))
                updater = Updater(state, beat=beat)
                state.model.train()
            elif what == _TAKE_WEIGHTS:
                _share_weights(model)
            elif what == _UPDATE:
                updater(batches, lr=rate, seed=number)
            elif what == _READ_METER:
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
