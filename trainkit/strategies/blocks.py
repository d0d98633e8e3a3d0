"""The blocks that a network is made of, found by its structure: what is sharded, or compiled, one by one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_ROWS = (nn.Sequential, nn.ModuleList)


def repeated_blocks(model: nn.Module, min_params: int) -> list[nn.Module]:
    """The blocks that a network repeats: innermost members of its Sequentials and ModuleLists with enough parameters.

    For a ViT these are its transformer blocks, for a ResNet its bottlenecks; no class needs to be named. Modules below
    ``min_params`` parameters stay with their parent, because gathering them costs more than it saves.
    """

    def inside(module: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        children = [*module.children()]
        # The stages of timm's RegNet are no Sequentials, but have several of one class and nothing else either.
        alike = len(children) > 1 and len({*map(type, children)}) == 1 and not isinstance(children[0], _ROWS)
        is_row = isinstance(module, _ROWS) or alike
        for child in children:
            blocks, size = inside(child), _size([child])
            # What has but one layer, or little of its block, such as EfficientNet's squeeze and excitation, is a part.
            whole = [block for block in blocks if _layers(block) > 1]
            if is_row and [*child.children()] and size >= min_params and 2 * _size(whole) < size:
                blocks = [child]
            found += blocks
        return found

    return [block for block in inside(model) if block is not model]


def _layers(module: nn.Module) -> int:
    """How many matrices and filters it has."""
    return sum(parameter.ndim > 1 for parameter in module.parameters())


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
