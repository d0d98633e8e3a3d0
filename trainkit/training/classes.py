"""Which class is which: a checkpoint says what it was trained on, for the data may have other classes by now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.data.base import Splits
from trainkit.errors import UserError
from trainkit.terminal import one_line

KEY = "classes"
"""Where a checkpoint's state has them."""
_LONGEST = 1 << 20
"""Characters of JSON: of more the checkpoint's record would be too long to be read."""
_SHOWN = 40


def told_classes(splits: Splits) -> dict[str, list[str]]:
    """For the state of a checkpoint: the names of the classes in the order of the model's outputs.

    Nothing where there are too many, and of a peer that has no data, nor names.
    """
    names = [str(name) for name in splits.info.class_names]
    is_known = len(splits.train) > 0 and len(json.dumps(names)) <= _LONGEST
    return {KEY: names} if is_known else {}


def classes_in(state: Mapping[str, Any]) -> tuple[str, ...] | None:
    """What a checkpoint was trained on; None where it does not say so."""
    names = state.get(KEY)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names)


def difference(trained: Sequence[str] | None, now: Sequence[str]) -> str:
    """What the data has otherwise than a checkpoint; empty where nothing, or where that does not say."""
    now = tuple(map(str, now))
    if trained is None or tuple(trained) == now:
        return ""
    if len(trained) != len(now):
        return f"it was trained on {len(trained)} classes, and the data has {len(now)}"
    first = next(label for label, (was, is_now) in enumerate(zip(trained, now, strict=True)) if was != is_now)
    return f"class {first} was {_shown(trained[first])} in training, and in the data is {_shown(now[first])}"


def require_same_classes(state: Mapping[str, Any], splits: Splits, root: str) -> None:
    """Raises UserError where the labels of the data mean other classes than in training."""
    if found := difference(classes_in(state), splits.info.class_names):
        raise UserError(
            f"The data in {root} has other classes than the checkpoint.",
            why=f"{found[0].upper()}{found[1:]}: its labels would stand for others.",
            fix="Give the data as it was: data.root=FOLDER, if it has moved; or train anew on this one.",
            key="data.root",
        )


def _shown(name: str) -> str:
    return f"'{one_line(name, _SHOWN)}'"
