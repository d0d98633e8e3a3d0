"""The blocks that a network is made of, found by its structure: what is sharded, or compiled, one by one."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module, min_params: int) -> list[nn.Module]:
    """The blocks that a network repeats: innermost members of its Sequentials and ModuleLists with enough parameters.

    For a ViT these are its transformer blocks, for a ResNet its bottlenecks; no class needs to be named. Modules below
    ``min_params`` parameters stay with their parent, because gathering them costs more than it saves.
    """

    def inside(module: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        for child in module.children():
            blocks = inside(child)
            is_member = isinstance(module, nn.Sequential | nn.ModuleList)
            if not blocks and is_member and any(True for _ in child.children()) and _size(child) >= min_params:
                blocks = [child]
            found += blocks
        return found

    return [block for block in inside(model) if block is not model]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
