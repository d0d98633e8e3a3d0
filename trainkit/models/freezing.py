"""Parameters that are not trained, by the patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from trainkit.errors import UserError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training every parameter whose name fits one of ``patterns`` (shell wildcards, ``blocks.[0-5].*``).

    A norm all of whose parameters are frozen keeps its running statistics too, or the frozen layers would change under
    the others.

    Raises:
        UserError: a pattern that fits nothing, or nothing would be left to train.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        fitting = [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.3) or list(named)[:3]
            raise UserError(
                f"model.freeze: no parameter fits '{pattern}'.",
                why=f"The model's are named like {', '.join(near)}.",
                fix='Use shell wildcards over whole names, for example model.freeze=["blocks.[0-5].*"].',
                key="model.freeze",
            )
        for name in fitting:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise UserError(
            "model.freeze leaves nothing to train.",
            why=f"Its patterns fit all {len(named)} parameters.",
            fix="Leave the head out: its name is the last one of the model's parameters.",
            key="model.freeze",
        )
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and hasattr(module, "running_mean") and not any(parameter.requires_grad for parameter in own):
            _keep_in_evaluation(module)


def _keep_in_evaluation(module: nn.Module) -> None:
    """``model.train()`` passes it by from now on."""
    module.eval()
    module.train = lambda mode=True: module  # type: ignore[method-assign]
