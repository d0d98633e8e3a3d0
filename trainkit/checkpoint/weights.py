"""Weights to start from: a file of somebody's training, of the same network up to its head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainkit.checkpoint.state import Held, Sent, follow_masters, load_where_named, plain_name, weights_of
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError

# Keys of the weights in a file that holds more: averaged ones first, which are the better ones.
_INSIDE = ("state_dict_ema", "model_ema", "ema", "state_dict", "model", "module")
_SHOWN = 3


def start_from(file: Path, model: nn.Module, dist: Distributed) -> tuple[str, ...]:
    """Give ``model`` the weights in ``file``; names of what stays as it is, for another head than the file's.

    Every rank calls it, whatever the strategy; only rank 0 reads the file. A ``.safetensors`` file, or one of
    ``torch.save``, of which only tensors are unpickled. Prefixes of DDP and of torch.compile are left out.

    Raises:
        UserError: on every rank, if the file cannot be read or is of another network.
    """
    own = weights_of(model)
    given = dist.together(lambda: _read(file) if dist.is_main else {})
    anew = dist.together(lambda: _left_out(file, given, own) if dist.is_main else ())
    taken = {name: value for name, value in given.items() if name in own and name not in anew}
    load_where_named(own, Sent(Held(taken), dist), dist)
    follow_masters(model.parameters())
    return tuple(dist.broadcast_json(list(anew)))


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            held: object = load_file(file)
        else:
            held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever torch makes of a file that is something else
        why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        # By its name, for nothing here has to do with pickle. Torch's own words advise to run whatever is in there.
        if type(problem).__name__ == "UnpicklingError":
            why = "It is no file of torch.save, or holds more than tensors: objects that could run code of a stranger"
        raise UserError(
            f"The weights in {file} cannot be read.",
            why=f"{why}.".replace("..", "."),
            fix="Use a .safetensors file, or one that torch.save(model.state_dict(), FILE) has written.",
            key="model.checkpoint",
        ) from problem
    for key in _INSIDE:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
            break
    tensors = {str(k): v for k, v in held.items() if isinstance(v, Tensor)} if isinstance(held, Mapping) else {}
    if not tensors:
        raise UserError(
            f"There are no weights in {file}.",
            why="It is no mapping of names to tensors, nor does it hold one as 'state_dict' or 'model'.",
            fix="Write it with torch.save(model.state_dict(), FILE).",
            key="model.checkpoint",
        )
    return {plain_name(name).removeprefix("module."): value for name, value in tensors.items()}


def _left_out(file: Path, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the model's own head, if the file has another one."""
    matrices = [name for name, value in own.items() if value.ndim > 1]
    head = f"{matrices[-1].rpartition('.')[0]}." if matrices else ""
    different = [
        name
        for name, value in own.items()  # older torch had no num_batches_tracked, and nobody needs it
        if (given[name].shape != value.shape if name in given else not name.endswith(".num_batches_tracked"))
    ]
    different += [name for name in given if name not in own]
    wrong = [name for name in different if not (head and name.startswith(head))]
    if wrong:
        words = "; ".join(f"{name} is {_shape(given, name)} there, {_shape(own, name)} here" for name in wrong[:_SHOWN])
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise UserError(
            f"The weights in {file} are of another network.",
            why=f"{words}{more}.",
            fix="Give model.name and its options as they were when the file was made.",
            key="model.checkpoint",
        )
    return tuple(name for name in own if name in different or (different and name.startswith(head)))


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return "x".join(map(str, tensors[name].shape)) or "one number" if name in tensors else "absent"
