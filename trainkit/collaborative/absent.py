"""A peer that does not train has no data set: what its model must know of the run's stands in the manifest."""

from __future__ import annotations

from typing import Any

from trainkit.collaborative.messages import Manifest
from trainkit.data.base import DataInfo, Splits
from trainkit.errors import RunFailedError


class _Nothing:
    """No samples."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        raise IndexError(index)


def _untouched(image: Any) -> Any:
    raise RunFailedError("An anchor has no images.", why="It does not train.", fix="Report this: it is a bug.")


def no_data(name: str, manifest: Manifest) -> Splits:
    """The run's data set without a sample; ``name``: its name.

    Its classes have numbers for names, and its channels no mean: no weights come of them, for an anchor takes its
    own over from the run. Where they decide about shapes nonetheless, the model is refused as another one.
    """
    info = DataInfo(
        name=name,
        num_classes=manifest.num_classes,
        in_chans=manifest.in_chans,
        image_size=manifest.image_size,
        class_names=tuple(map(str, range(manifest.num_classes))),
        mean=(0.0,) * manifest.in_chans,
        std=(1.0,) * manifest.in_chans,
    )
    nothing = _Nothing()
    return Splits(info, nothing, nothing, nothing, _untouched, _untouched, in_memory=True)
