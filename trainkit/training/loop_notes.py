"""Notes on the updates of a user's own loop: what a rank that survives another one saves of the last finished one.

Weights and moments are changed by the optimizer alone, so they are noted where they lie; all else is copied when an
update is finished. Of several optimizers one changes its weights before another one's gradients are exchanged: what
they change is copied as well. A checkpoint has the values of rank 0, from which those of others may differ: so rank 0
tells the others its buffers (BatchNorm's statistics) before what is noted changes, and its plain values at the end of
an update wherever one of them is another one's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from trainkit.checkpoint.alone import Stems
from trainkit.checkpoint.objects import SavedObjects, Value
from trainkit.distributed.process_group import Distributed
from trainkit.training.survivor import Survivor

_Noted = tuple[Stems, Mapping[str, Any]]


class LoopNotes:
    """Notes on a loop that optimizers train, for a survivor that is armed. Every rank calls every method."""

    def __init__(
        self, survivor: Survivor, objects: SavedObjects, optimizers: Sequence[torch.optim.Optimizer], dist: Distributed
    ) -> None:
        self._survivor = survivor
        self._objects = objects
        self._alone = optimizers[0] if len(optimizers) == 1 else None
        """The optimizer whose weights and moments are noted where they lie."""
        self._dist = dist
        self._buffers: tuple[Tensor, Tensor] | None = None
        """Buffers of this rank and of rank 0, before the weights of this update change; None until then."""
        self._are_alike = True
        """The plain values of all ranks were the same after the last update."""
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._noted: Callable[[], _Noted | None] = lambda: None
        if self._alone is not None:
            self._alone.register_step_pre_hook(lambda *_: self._begin())

    def _begin(self) -> None:
        """Note that the weights change from here on."""
        self._learn_buffers()
        self._survivor.changes()

    def _learn_buffers(self) -> None:
        """Learn the buffers of rank 0, once an update."""
        if self._buffers is None:
            own = _flat(self._objects.buffers())
            of_main = own.clone()
            if own.numel() and self._dist.world_size > 1:
                c10d.broadcast(of_main, src=0)
            self._buffers = (own, of_main)

    def take(self, step: int, counted: Mapping[str, Any]) -> None:
        """Note the state at the end of an update.

        Args:
            counted: see `finished`.
        """
        self._learn_buffers()
        assert self._buffers is not None
        before, of_main = self._buffers
        self._buffers = None
        buffers = self._objects.buffers()
        flat = _flat(buffers)
        is_main = self._dist.is_main
        is_known = is_main or torch.equal(flat, before) or torch.equal(flat, of_main)
        if not is_main:
            flat = of_main
        values = _copied(self._objects.values())
        # Where all is copied, what was noted last is still whole, and is kept until all ranks have come so far.
        if self._alone is None:
            values = self._of_all(values)
        self._survivor.changes()
        tensors, moved = self._tensors(buffers)
        versions = _versions(moved)

        def noted() -> _Noted | None:
            if not is_known or _versions(moved) != versions:  # not the optimizer alone has changed the weights
                return None
            stems = {stem: dict(named) for stem, named in tensors.items()}
            for stem, name, buffer in _parts(flat, buffers):
                stems[stem][name] = buffer
            for name, value in values.items():
                stems.setdefault(name, {}).update(value.tensors)
            plain = {name: value.plain for name, value in values.items()}
            return {stem: named for stem, named in stems.items() if named}, plain

        # Should rank 0 be gone by now, the values of others are its own as well, if they were after the update before.
        has_values = self._alone is None or is_main or self._are_alike
        self._noted = noted if has_values else lambda: None
        self.finished(step, counted)
        if self._alone is not None:
            values = self._of_all(values)
        self._noted = noted

    def _of_all(self, values: dict[str, Value]) -> dict[str, Value]:
        """Return the values of rank 0, by which all go on."""
        digest = _digest(values)
        votes = torch.tensor([digest, -digest])
        if self._dist.world_size > 1:
            c10d.all_reduce(votes, op=c10d.ReduceOp.MAX)
        self._are_alike = votes.sum().item() == 0
        if self._are_alike:
            return values
        return _of_main(values, self._dist)

    def finished(self, step: int, counted: Mapping[str, Any]) -> None:
        """Have a survivor save what was noted last, as of ``step``, with the plain values ``counted``."""
        noted = self._noted

        def collect() -> _Noted | None:
            found = noted()
            if found is None:
                return None
            stems, plain = found
            return stems, {"objects": plain, "stems": sorted(stems), **counted}

        self._survivor.finished(step, collect)

    def _tensors(self, buffers: Stems) -> tuple[dict[str, dict[str, Tensor]], list[Tensor]]:
        """Return all but the buffers: what the optimizer changes as it is, the rest as copies; and the former alone."""
        places: set[int] = set()
        if self._alone is not None:
            for group in self._alone.param_groups:
                for parameter in group["params"]:
                    moments = self._alone.state.get(parameter, {}).values()
                    places.update(item.data_ptr() for item in (parameter, *moments) if isinstance(item, Tensor))
        stems: dict[str, dict[str, Tensor]] = {}
        moved: list[Tensor] = []
        for stem, named in self._objects.tensors().items():
            stems[stem] = {}
            for name, value in named.items():
                if value.data_ptr() in places:
                    moved.append(value)
                    stems[stem][name] = value
                elif name not in buffers.get(stem, {}):
                    stems[stem][name] = self._copy(stem, name, value)
        return stems, moved

    def _copy(self, stem: str, name: str, value: Tensor) -> Tensor:
        """Copy a tensor over its copy of before: new memory costs more than the copying."""
        copy = self._copies.get((stem, name))
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = torch.empty_like(value)
        self._copies[stem, name] = copy.copy_(value)
        return copy


def _versions(tensors: list[Tensor]) -> list[int]:
    """Number of times that each was changed in place."""
    return [tensor._version for tensor in tensors]


def _copied(values: Mapping[str, Value]) -> dict[str, Value]:
    copies: dict[str, Value] = {}
    for name, value in values.items():
        copies[name] = Value(value.plain, {key: tensor.detach().clone() for key, tensor in value.tensors.items()})
    return copies


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _flat(stems: Stems) -> Tensor:
    """Copy tensors into one, of bytes."""
    parts = [_bytes_of(tensor) for named in stems.values() for tensor in named.values()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _parts(flat: Tensor, like: Stems) -> list[tuple[str, str, Tensor]]:
    """Take apart what `_flat` has made of such tensors: stem, name, tensor."""
    found: list[tuple[str, str, Tensor]] = []
    first = 0
    for stem, named in like.items():
        for name, tensor in named.items():
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            _bytes_of(made).copy_(flat[first : first + made.nbytes])
            first += made.nbytes
            found.append((stem, name, made))
    return found


def _digest(values: Mapping[str, Value]) -> int:
    """A number that is the same for the same values."""
    found = hashlib.blake2b(digest_size=7)
    for name, value in values.items():
        found.update(json.dumps([name, value.plain, [*value.tensors]]).encode())
        for tensor in value.tensors.values():
            found.update(_bytes_of(tensor).numpy().tobytes())
    return int.from_bytes(found.digest(), "big")


def _of_main(values: Mapping[str, Value], dist: Distributed) -> dict[str, Value]:
    """Return the values of rank 0 on every rank."""
    told: list[Any] = []
    for name, value in values.items():
        facts = [[key, str(item.dtype).removeprefix("torch."), list(item.shape)] for key, item in value.tensors.items()]
        told.append([name, value.plain, facts])
    received: dict[str, Value] = {}
    for name, plain, facts in dist.broadcast_json(told):
        tensors = {key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, dtype, shape in facts}
        received[name] = Value(plain, tensors)
    stems = {name: value.tensors for name, value in (values if dist.is_main else received).items()}
    flat = _flat(stems)
    if flat.numel():
        c10d.broadcast(flat, src=0)
    for name, key, tensor in _parts(flat, stems):
        received[name].tensors[key].copy_(tensor)
    return received
