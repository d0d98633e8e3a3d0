"""What loggers tell of a run besides its curves: its hyperparameters, and which class was taken for which."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit import fileio
from trainkit.config.loading import flatten
from trainkit.config.schema import Config
from trainkit.monitor.base import Start
from trainkit.run.folder import RunDir

SETTINGS = frozenset({"seed", "model", "data", "train", "optim", "schedule", "strategy"})
"""What a run was trained with. `launch` is not among them: its setup lines and mail address are nobody's business."""


def settings(config: Config, start: Start) -> dict[str, object]:
    """The settings of the training by section, with what ``auto`` has come to on this device."""
    told: dict[str, object] = config.model_dump(mode="json", include=set(SETTINGS))
    train = {**config.train.model_dump(mode="json")}
    train |= {"precision": start.precision} if start.precision else {}
    train |= {"micro_batch_size": start.micro_batch_size} if start.micro_batch_size else {}
    return {**told, "train": train}


def hyperparameters(config: Config, start: Start) -> dict[str, float | str | bool]:
    """The same by dotted keys, those that are one value each, with the number of ranks."""
    flat = {**dict(flatten(settings(config, start))), "world_size": start.world_size}
    return {key: value for key, value in flat.items() if isinstance(value, bool | int | float | str)}


def shown_name(run_dir: RunDir) -> str:
    """Under which it is listed; a run of a sweep, whose folder is called 0, with that of the sweep."""
    of_sweep = (run_dir.path.parent / "sweep.json").is_file()
    return f"{RunDir(run_dir.path.parent).name}-{run_dir.name}" if of_sweep else run_dir.name


@dataclass(frozen=True)
class Taken:
    """Which class was taken for which."""

    classes: list[str]
    pairs: list[tuple[int, int, int]]
    """(class, class that it was taken for, samples)"""

    def rows(self) -> list[list[int]]:
        """Samples, [class, class that it was taken for]."""
        counts = [[0] * len(self.classes) for _ in self.classes]
        for label, told, samples in self.pairs:
            counts[label][told] = samples
        return counts


def taken_for(run_dir: RunDir, most_classes: int) -> Taken | None:
    """Of the test, as ``confusion.json`` has it; None without that, or for data of more classes."""
    told = fileio.read_object(run_dir.confusion)
    classes, pairs = told.get("classes"), told.get("raw")
    if not isinstance(classes, list) or not isinstance(pairs, list) or not 0 < len(classes) <= most_classes:
        return None
    try:
        known = [(int(label), int(other), int(samples)) for label, other, samples in pairs]
    except (TypeError, ValueError):
        return None
    inside = all(0 <= label < len(classes) and 0 <= other < len(classes) for label, other, _ in known)
    return Taken([str(name) for name in classes], known) if inside else None
