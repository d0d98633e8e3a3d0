"""How long a checkpoint keeps training waiting.

ResNet-50 with AdamW, 307 MB. Arms: ``torch.save`` of the same tensors into one file (no hash, no fsync, no rename), and
the kit's save, which returns when it has its copy. Wall time of the one thread that trains; the files are in memory
where /dev/shm has room, which favours ``torch.save``. Then what the thread that writes costs: how much longer updates
take while it works.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from tests.benchmarks.measuring import Figure, against, fast_folder, take_turns, wall_seconds
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import moments_of, weights_of
from trainkit.cluster.ranks import RankEnv
from trainkit.distributed.process_group import Distributed

ROUNDS = 7
BUSY = 3
"""Rounds of short turns in each of those."""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the two do not hold the same.
    """
    torch.set_num_threads(1)
    model, optimizer = trained()
    tensors = {**weights_of(model), **moments_of(model, optimizer)}
    size = sum(value.numel() * value.itemsize for value in tensors.values())
    with tempfile.TemporaryDirectory(dir=fast_folder(5 * size)) as name:
        folder, file = Path(name) / "checkpoints", Path(name) / "plain.pt"
        dist = Distributed(RankEnv.single(), torch.device("cpu"))
        checkpoints = Checkpoints(folder, keep=1, dist=dist, asynchronous=True)
        steps = iter(range(1, 1_000_000))

        def save() -> None:
            checkpoints.save(model, optimizer, step=next(steps), state={})

        def kit() -> float:
            seconds = wall_seconds(save)
            checkpoints.settle()
            return seconds

        def plain() -> float:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return wall_seconds(lambda: torch.save(state, file))

        def meanwhile() -> float:
            save()
            seconds = wall_seconds(updates)
            checkpoints.settle()
            return seconds

        first, _ = kit(), plain()
        kept = load_file(folder / "latest/model.safetensors")
        loaded = torch.load(file, weights_only=True)["model"]
        assert all(torch.equal(kept[name], value) for name, value in loaded.items()), "they do not hold the same"
        saves = take_turns({"torch.save": plain, "kit": kit}, rounds)
        busy = take_turns({"alone": lambda: wall_seconds(updates), "meanwhile": meanwhile}, BUSY * rounds)
    what = f"a checkpoint of {size / 1e6:.0f} MB keeps training waiting, to `torch.save`"
    note = f"the first of a run {first:.2f} s"
    headline = "time for which a checkpoint keeps training waiting, to `torch.save`"
    beside = "a tenth of a second of updates while a checkpoint is written, to those without"
    waits = against(saves, "kit", what=what, at_most=0.35, tolerance=0.1, note=note, headline=headline)
    return [waits, against(busy, "meanwhile", what=beside)]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A ResNet-50 after an update of AdamW."""
    from torchvision.models import resnet50

    model: nn.Module = resnet50()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def updates() -> None:
    """A tenth of a second of what training does."""
    a = torch.ones(1000, 1000)
    for _ in range(4):
        a = torch.tanh(a @ a)
