"""Samples that training does not see: counted by reason, and refused unless somebody allows them.

For a broken image that is allowed, the next whole one in the data's own order stands in, with its label: a function of
the data alone, so that every rank, worker and attempt takes the same. Evaluation leaves it out of its counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from trainkit.common import jsonl, terminal
from trainkit.common.errors import UserError
from trainkit.data import image_kinds
from trainkit.data.base import pair_of
from trainkit.data.decoding import BrokenImageError
from trainkit.data.image_kinds import LeftOut

NO_LABEL = "without a label"
PATH_ONLY = "with a path instead of the image"
NO_IMAGE = "without an image"
NOT_AN_IMAGE = "whose content is not an image"
LOST_LINK = "that are links out of their archive"
BESIDE = "beside the image of their sample"
NO_SAMPLE = "that are not images"
HIDDEN = "that are hidden"
NO_TEST = "none; val is used instead"
SPLIT_OFF = "split off train"


class LostSamples(dict[str, tuple[int, str]]):
    """Reason -> how many there are, and the first of them."""

    def note(self, reason: str, example: str, count: int = 1) -> None:
        """Count one more, or ``count`` more."""
        known, first = self.get(reason, (0, terminal.one_line(example, 200)))
        self[reason] = (known + count, first)

    def add(self, others: LeftOut, prefix: str = "") -> None:
        """Count those of another list as well, ``prefix`` before its examples."""
        for reason, (count, example) in others.items():
            self.note(reason, f"{prefix}{example}", count)


def total(lost: LeftOut) -> int:
    """Count all of them."""
    return sum(count for count, _ in lost.values())


def summed(parts: Iterable[LeftOut]) -> LostSamples:
    """Return the sum of several lists."""
    found = LostSamples()
    for part in parts:
        found.add(part)
    return found


def refuse(lost: LeftOut, most: int, where: str) -> None:
    """Raise UserError where more than ``most`` samples would be lost."""
    count = total(lost)
    if count > most:
        what = f"{terminal.plural(count, 'sample')} of {where} would be lost."
        fix = f"Fix them, and repeat the command; or skip them: data.max_broken={count}."
        why = f"There are {image_kinds.left_out_in_words(lost)}."
        raise UserError(what, why=why, fix=fix, key="data.max_broken")


def to_json(left_out: LeftOut) -> dict[str, Any]:
    """For a file that people and programs read."""
    return {why: {"count": count, "example": example} for why, (count, example) in left_out.items()}


def from_json(told: Mapping[str, Any]) -> LostSamples:
    """Read what `to_json` gave. Raises KeyError, TypeError, ValueError or AttributeError for what it did not give."""
    return from_pairs({why: (about["count"], about["example"]) for why, about in told.items()})


def from_pairs(told: Any) -> LostSamples:
    """Read reason -> [count, example], as JSON keeps it. Raises ValueError or TypeError for what is none."""
    if not isinstance(told, dict):
        raise TypeError("the left-out files are not a list of reasons")
    found = LostSamples()
    for why, (count, example) in told.items():
        if not isinstance(example, str) or not jsonl.is_whole(count):
            raise ValueError("the left-out files have no counts")
        found.note(terminal.one_line(why, 200), example, count)
    return found


class SplitCounts(NamedTuple):
    """Counts of what is read of a split, and of what is not."""

    images: int
    classes: int
    left_out: LeftOut
    note: str = ""
    """A further remark on the split, for people."""

    def in_words(self) -> str:
        """One line."""
        words: list[str] = []
        if self.images:
            words.append(f"{self.images:,} images of {self.classes:,} classes")
        if self.note:
            words.append(self.note)
        if self.left_out:
            words.append(f"left out: {image_kinds.left_out_in_words(self.left_out)}")
        return "; ".join(words)

    def to_json(self) -> dict[str, Any]:
        """For a manifest."""
        return self._asdict() | {"left_out": to_json(self.left_out)}


Counts = Mapping[str, SplitCounts]
"""Split -> what is read of it."""


def in_lines(counts: Counts) -> list[str]:
    """A line for each split."""
    return [f"{split}: {of.in_words()}." for split, of in counts.items()]


class BrokenImages:
    """Number of images that may be broken, and those that this rank has met and not told the others: file -> why."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.met: dict[str, str] = {}
        self.waited: dict[str, float] = {}
        """Files far away that it has waited for, and for how many seconds."""

    def take(self) -> tuple[dict[str, str], dict[str, float]]:
        """Return the images met and the files waited for since the last call."""
        taken = (self.met, self.waited)
        self.met = {}
        self.waited = {}
        return taken


Read = Callable[[int], tuple[Any, Any]]
"""Number of a sample -> its image and label."""


def read_whole(read: Read, count: int, index: int, most: int, met: dict[str, str]) -> tuple[Any, Any, bool]:
    """Read image and label of sample ``index`` of ``count``, or of the next whole one; and whether it is that sample
    itself.

    Args:
        most: how many broken ones may be skipped; one more raises its BrokenImageError.
        met: broken ones are added here.
    """
    for skipped in range(most + 1):
        try:
            image, label = pair_of(read((index + skipped) % count))
            return image, label, skipped == 0
        except BrokenImageError as error:
            met[error.file] = error.why
            last = error
    raise last
