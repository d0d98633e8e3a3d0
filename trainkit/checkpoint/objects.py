"""Objects of a user's own loop in a checkpoint: whatever has a state, and plain values.

Tensors go to safetensors, a stem for each object by its name; what is left of its state goes to ``state.json``, with
floats to their last bit. JSON has no tuples, and only text as keys: what it has no word for is an object with one key
that begins with ``!``. Nothing is pickled: what is neither tensor nor plain value is refused by its name.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.checkpoint.format import LONGEST
from trainkit.checkpoint.safetensors_files import DTYPES
from trainkit.checkpoint.state import (
    TensorSource,
    load_moments,
    load_weights,
    moments_of,
    parameters_of,
    plain_name,
    unwrapped,
    weights_of,
)
from trainkit.common.errors import UserError
from trainkit.distributed.process_group import Distributed, local_part

_DEEPEST = 12
"""Lists in lists in lists: what `trainkit.checkpoint.format` reads again, with room around it."""
_WHOLE = 2**63
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_STATES = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))
"""Methods that give the state of an object, and put it back."""


def has_state(value: object) -> bool:
    """Return whether it is an object whose state can be saved and put back: a module, an optimizer, a generator."""
    return _methods(value) is not None


def _methods(value: object) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, partial(setattr, bits, "state")
    for get, put in _STATES:
        if callable(getattr(value, get, None)) and callable(getattr(value, put, None)):
            return getattr(value, get), getattr(value, put)
    return None


# Values


class Packed:
    """Values taken apart, into what JSON can hold and tensors.

    Args:
        whose: for errors: the name of the object or value.
    """

    def __init__(self, whose: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._whose = whose

    def pack(self, value: Any, path: str = "", depth: int = 0) -> Any:
        """Return the value for JSON. Raises UserError for what can be neither there nor a tensor."""
        if depth > _DEEPEST:
            raise self._refused(path, "lists or mappings in one another too deep")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < _WHOLE else {"!int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"!float": str(value)}
        if isinstance(value, Tensor):
            return {"!tensor": self._keep(path, value)}
        if isinstance(value, np.ndarray | np.generic):
            return {"!numpy": self._keep(path, torch.from_numpy(np.array(value))), "is_array": kind is np.ndarray}
        if kind in (list, tuple):
            items = [self.pack(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
            return items if kind is list else {"!tuple": items}
        if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
            if kind is dict and all(type(key) is str and not key.startswith("!") for key in value):
                return {key: self.pack(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
            pairs = []
            for key, item in value.items():
                pairs.append(
                    [self.pack(key, f"{path} (a key)", depth + 2), self.pack(item, f"{path}.{key}", depth + 2)]
                )
            return {f"!{kind.__name__}": pairs}
        raise self._refused(path, f"a {kind.__name__}")

    def _keep(self, path: str, value: Tensor) -> str:
        name = path.removeprefix(".") or "value"
        if value.dtype not in DTYPES.values() or value.layout != torch.strided:
            raise self._refused(path, f"a tensor of {str(value.dtype).removeprefix('torch.')} ({value.layout})")
        self.tensors[name] = value.detach()
        return name

    def _refused(self, path: str, what: str) -> UserError:
        return UserError(
            f"{self._whose}{path} cannot be saved: it is {what}.",
            why="A checkpoint holds tensors, numbers, texts, None, and lists, tuples and dicts of them; and no pickle, "
            "which would run code when it is read.",
            fix=f"Keep something else in {self._whose}, or leave it out of rank.saved().",
        )


def unpacked(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `Packed.pack` has taken apart."""
    if isinstance(plain, list):
        return [unpacked(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    word = next(iter(plain), "")
    if not word.startswith("!"):
        return {key: unpacked(item, tensors) for key, item in plain.items()}
    held = plain[word]
    if word == "!int":
        return int(held)
    if word == "!float":
        return float(held)
    if word == "!tensor":
        return tensors[held]
    if word == "!numpy":
        array = tensors[held].cpu().numpy()
        return array if plain["is_array"] else array[()]
    if word == "!tuple":
        return tuple(unpacked(item, tensors) for item in held)
    pairs = [(unpacked(key, tensors), unpacked(item, tensors)) for key, item in held]
    return _MAPPINGS[word[1:]](pairs)


# Objects


class Value(NamedTuple):
    """A value taken apart: what JSON can hold, and tensors."""

    plain: Any
    tensors: dict[str, Tensor]


class SavedObjects:
    """Objects and plain values by the names that they are saved by.

    Args:
        values: plain values, which `save` looks at anew each time and `restore` replaces.
    """

    def __init__(self, objects: Mapping[str, Any], values: dict[str, Any], dist: Distributed) -> None:
        self._objects = dict(objects)
        self._values = values
        self._dist = dist
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters of all modules, by the name of the module and their own."""
        for name, item in objects.items():
            if isinstance(item, nn.Module):
                for inner, parameter in parameters_of(item).items():
                    self.parameters.setdefault(f"{name}.{inner}", parameter)
        for name, item in values.items():
            if isinstance(item, nn.Parameter):
                self.parameters[name] = item
        for name, item in objects.items():
            if isinstance(item, torch.optim.Optimizer):
                self._require_parameters(name, item)

    @property
    def names(self) -> list[str]:
        """Names of all objects and values."""
        return [*self._objects, *self._values]

    def _require_parameters(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        known = set(map(id, self.parameters.values()))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UserError(
                        f"{name} updates a parameter {tuple(parameter.shape)} of no module that is saved.",
                        why="Its state is saved by the names of parameters, and sharding replaces the parameters.",
                        fix="Give rank.saved() all modules that it trains, and make it after rank.wrap().",
                    )

    def packed(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """Return plain values and tensors of all. Raises UserError, by its name, for what cannot be saved."""
        plain: dict[str, Any] = {}
        stems = self.tensors()
        for name, held in self.values().items():
            plain[name] = held.plain
            stems.setdefault(name, {}).update(held.tensors)
        stems = {name: tensors for name, tensors in stems.items() if tensors}
        for name, item in self._objects.items():
            if isinstance(item, nn.Module):
                self._require_tensors(name, item)
            elif isinstance(item, torch.optim.Optimizer):
                for state in item.state.values():
                    for kind, value in state.items():
                        if value is not None and not isinstance(value, Tensor | int | float):
                            what = object() if isinstance(value, list | tuple | dict) else value
                            Packed(name).pack(what, f".state.{kind}")
        size = len(json.dumps(plain))
        if size > LONGEST // 2:
            largest = max(plain, key=lambda name: len(json.dumps(plain[name])))
            raise UserError(
                f"{largest} is too large for a plain value: {size} bytes of {LONGEST // 2}.",
                why="Plain values are text in a small file.", fix="Keep many numbers in a tensor.",
            )  # fmt: skip
        return plain, stems

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights and buffers of modules and the moments of optimizers, where they lie."""
        stems: dict[str, dict[str, Tensor]] = {}
        for name, item in self._objects.items():
            if isinstance(item, nn.Module):
                stems[name] = weights_of(item)
            elif isinstance(item, torch.optim.Optimizer):
                stems[name] = moments_of(self.parameters, item)
        return stems

    def buffers(self) -> dict[str, dict[str, Tensor]]:
        """Return those of `tensors` that are buffers of modules."""
        stems: dict[str, dict[str, Tensor]] = {}
        for stem, item in self._objects.items():
            if isinstance(item, nn.Module):
                inner = unwrapped(item)
                weights = inner.state_dict()
                names = [name for name, _ in inner.named_buffers(remove_duplicate=False) if name in weights]
                stems[stem] = {plain_name(name): weights[name] for name in names}
        return stems

    def values(self) -> dict[str, Value]:
        """Return everything else: settings of optimizers, states, and plain values. Raises UserError as `packed`."""
        values: dict[str, Value] = {}
        for name, item in {**self._objects, **self._values}.items():
            held = Packed(name)
            plain: Any = None
            if isinstance(item, torch.optim.Optimizer):
                plain = []
                for index, group in enumerate(item.param_groups):
                    plain.append(held.pack(_settings(group), f".param_groups.{index}"))
            elif not isinstance(item, nn.Module):
                plain = held.pack(_state_of(item))
            values[name] = Value(plain, held.tensors)
        return values

    def _require_tensors(self, name: str, module: nn.Module) -> None:
        for key, value in unwrapped(module).state_dict().items():
            if not isinstance(value, Tensor):
                Packed(name).pack(object(), f".{key}")

    def require_same(self, plain: Mapping[str, Any]) -> None:
        """Refuse what `packed` gave of other objects; further plain values may have joined these, with their first one.

        Raises UserError, the same on every rank.
        """
        missing = sorted(set(self._objects) - set(plain))
        left = sorted(set(plain) - set(self.names))
        if missing or left:
            raise UserError(
                "The checkpoint is of other objects than those given to rank.saved().",
                why=f"It lacks {', '.join(missing) or 'none'}, and has {', '.join(left) or 'no other'} besides.",
                fix="Save each object by the name that it had before, or begin another run.",
            )

    def restore(self, plain: Mapping[str, Any], source: Callable[[str], TensorSource], stems: set[str]) -> None:
        """Put back what `packed` gave: modules first, then optimizers, then what may look at them.

        Args:
            plain: the plain values.
            source: where the tensors of a stem come from.
            stems: names with tensors.
        """

        def order(name: str) -> int:
            item = self._objects.get(name)
            return 0 if isinstance(item, nn.Module) else 1 + (not isinstance(item, torch.optim.Optimizer))

        for name in sorted(plain, key=order):
            if name not in self._objects and name not in self._values:
                continue
            item = self._objects.get(name)
            held = plain[name]
            if isinstance(item, nn.Module):
                load_weights(item, source(name), self._dist)
            elif isinstance(item, torch.optim.Optimizer):
                tensors = source(name) if name in stems else None
                if tensors is not None:
                    load_moments(self.parameters, item, tensors, self._dist)
                for group, settings in zip(item.param_groups, held, strict=True):
                    group.update(unpacked(settings, {}))
            else:
                present = Packed(name)
                current = item if item is not None else self._values[name]
                present.pack(_state_of(current))
                tensors_of: dict[str, Tensor] = {}
                if name in stems:
                    tensors_of = _taken(source(name), present.tensors)
                value = unpacked(held, tensors_of)
                if isinstance(current, Tensor) and current.shape == value.shape:  # which others may hold, too
                    with torch.no_grad():
                        local_part(current).copy_(local_part(value))
                elif item is None:
                    self._values[name] = value
                else:
                    methods = _methods(item)
                    assert methods is not None
                    methods[1](value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of an optimizer's group but its parameters and the tensors, which are saved with its state."""
    return {key: value for key, value in group.items() if key != "params" and not isinstance(value, Tensor)}


def _state_of(item: Any) -> Any:
    methods = _methods(item)
    return item if methods is None else methods[0]()


def _taken(source: TensorSource, present: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take all tensors of a stem, each on the device of the present one of its name and sharded as that is."""
    found: dict[str, Tensor] = {}
    for name, (dtype, shape) in source.facts.items():
        like = present.get(name)
        if like is None or tuple(like.shape) != shape:
            found[name] = source.take(name, torch.empty(shape, device="meta"))
            continue
        value = torch.empty_like(like, dtype=dtype)
        local_part(value).copy_(source.take(name, like))
        found[name] = value
    return found
