"""The ranks of one peer: several GPUs that are one peer to the swarm.

Rank 0 speaks for it: it alone knows the swarm, watches the clock, hears the signals and keeps the records. Before every
update it tells the others that there is one, and with which learning rate; they train with it by DDP, and know nothing
of rounds. Where the swarm has changed rank 0's weights, they get the very same bits before they go on.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from torch import nn

from trainkit import fileio
from trainkit.config.loading import load, to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Batch, Splits, derive_seed
from trainkit.data.loader import Batches
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RunFailedError, UserError
from trainkit.models import build_model
from trainkit.strategies import AsItIs
from trainkit.swarm.sync_diloco import CommonState
from trainkit.tasks.meter import Meter
from trainkit.training.build import TrainState, alone, build
from trainkit.training.update import Updater

PATIENCE = timedelta(hours=1)
"""How long ranks wait for rank 0, which validates, saves and meets others meanwhile. A death is noticed at once."""
_FOREVER = 1 << 40
_ORDER = struct.Struct("<BQd")


class _Do(IntEnum):
    LEAVE = 0
    BEGIN = 1
    """Load data from here on."""
    TAKE_WEIGHTS = 2
    UPDATE = 3
    READ_METER = 4


@dataclass
class Team:
    """Rank 0's hand on the others; of a peer with one rank, nobody's."""

    parts: TrainState
    """What trains: spread over the ranks."""
    judge: TrainState
    """The same model for rank 0 alone, which validates and saves while the others wait."""
    common: CommonState
    _seen: int = field(default=-1, init=False)
    """Version of the weights that all have."""

    @property
    def size(self) -> int:
        """Ranks."""
        return self.parts.dist.world_size

    def batches(self, seed: int, position: int) -> Batches[Batch]:
        """This rank's batches, from global batch ``position`` on; the others load theirs."""
        self._order(_Do.BEGIN, position)
        return self.parts.batches(position, _FOREVER, seed=seed)

    def before_update(self, lr: float, seed: int) -> None:
        """Tell the others to make the update that this rank makes next."""
        if self.size == 1:
            return
        if self._seen != self.common.version:
            self._order(_Do.TAKE_WEIGHTS)
            _share_weights(self.judge.model, self.parts.dist)
            self._seen = self.common.version
        self._order(_Do.UPDATE, seed, lr)

    def read(self, meter: Meter) -> dict[str, float]:
        """What has been measured on all ranks."""
        self._order(_Do.READ_METER)
        return meter.read()

    def _order(self, what: _Do, number: int = 0, rate: float = 0.0) -> None:
        if self.size > 1:
            order = bytearray(_ORDER.pack(what, number, rate))
            c10d.broadcast(torch.frombuffer(order, dtype=torch.uint8), src=0)

    def dismiss(self) -> None:
        """Let the others go."""
        with suppress(RuntimeError):  # a rank that has died does not hear it
            self._order(_Do.LEAVE)


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
            fix="See the other ranks' logs; most often memory ran out. The swarm goes on without this peer.",
        ) from None


@contextmanager
def spread(config: Config, dist: Distributed, splits: Splits, common: CommonState, identity: str) -> Iterator[Team]:
    """Rank 0's part: the others are told what is trained, and at the end to leave.

    Args:
        identity: what makes this peer's data order its own.

    Raises UserError when a global batch cannot be divided among the ranks.
    """
    if dist.world_size == 1:
        parts = build(alone(config), dist, splits, model=common.model)
        yield Team(parts, parts, common)
        return
    _check_batch(config, dist.world_size)
    dist.broadcast_json({"config": to_yaml(config), "identity": identity})
    parts = build(_as_ddp(config), dist, splits, model=common.model)
    solo = Distributed(replace(dist.env, rank=0, world_size=1), dist.device)
    team = Team(parts, replace(parts, config=alone(config), dist=solo, model=common.model, strategy=AsItIs()), common)
    try:
        yield team
    finally:
        team.dismiss()


def follow(dist: Distributed, *, beat: Callable[[], None] = lambda: None) -> nn.Module:
    """Any other rank: do what rank 0 says, until it says that this is all. The model that it has trained.

    Raises RunFailedError when rank 0 has died.
    """
    with together(dist.world_size):
        told: dict[str, Any] = dist.broadcast_json({})
        # Rank 0, who knows the secret, has asked whether its code may be run.
        with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
            file = Path(folder) / "rank-0.yaml"
            fileio.write(file, told["config"])
            config = load(str(file)).config
        splits = build_data(config.data)
        model = build_model(config.model, splits.info, config.seed)
        parts = build(_as_ddp(config), dist, splits, model=model)
        seed, updater = data_seed(config, told["identity"]), Updater(parts, beat=beat)
        loader: Batches[Batch] | None = None
        order = torch.empty(_ORDER.size, dtype=torch.uint8)
        try:
            while True:
                c10d.broadcast(order, src=0)
                what, number, rate = _ORDER.unpack(order.numpy().tobytes())
                if what == _Do.LEAVE:
                    return model
                beat()
                if what == _Do.BEGIN:
                    if loader is not None:
                        loader.close()
                    loader, updater = parts.batches(number, _FOREVER, seed=seed), Updater(parts, beat=beat)
                    parts.model.train()
                elif what == _Do.TAKE_WEIGHTS:
                    _share_weights(model, dist)
                elif what == _Do.UPDATE:
                    assert loader is not None
                    updater(loader, lr=rate, seed=number)
                elif what == _Do.READ_METER:
                    updater.meter.read()
        finally:
            if loader is not None:
                loader.close()


def _as_ddp(config: Config) -> Config:
    return config.model_copy(update={"strategy": type(config.strategy)(name="ddp")})


def _check_batch(config: Config, ranks: int) -> None:
    size, micro = config.train.global_batch_size, config.train.given_micro_batch_size
    pass_size = ranks * (micro or 1)
    if size % pass_size:
        each = f"micro batches of {micro} each" if micro else "samples for each"
        raise UserError(
            f"An update of {size} samples cannot be divided among the {ranks} ranks of this peer.",
            why=f"They need {each}, alike, and {size} is no multiple of {pass_size}.",
            fix="Use a number of ranks that divides it" + (", or another train.micro_batch_size." if micro else "."),
        )


@torch.no_grad()
def _share_weights(model: nn.Module, dist: Distributed) -> None:
    """Rank 0's weights and buffers, bit for bit, in the model of every rank."""
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers())]
    for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == kind]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
        c10d.broadcast(flat, src=0)
        if not dist.is_main:
            for tensor, part in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view_as(tensor))
