"""Broken images, told to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.errors import UserError
from trainkit.run.events import Writer, read_events
from trainkit.training.parts import Parts


def share_broken(parts: Parts, known: Sequence[str], writer: Writer) -> list[str]:
    """The files that any rank has met and ``known`` does not have, on all of them. Every rank calls it.

    An event names each, once in the life of a run.

    Raises:
        UserError: on every rank, if these are more than ``data.max_broken`` with those that are known.
    """
    found: dict[str, str] = {}
    for of_rank in parts.dist.gather_json(parts.broken.take()):
        found |= of_rank
    new = sorted(file for file in found if file not in known)
    if new and parts.dist.is_main:
        told = {event.get("file") for event in read_events(writer.run, "broken_image")}  # by earlier attempts
        for file in new:
            if file not in told:
                writer.attempt.remark("broken_image", file=file, why=found[file])
    if len(known) + len(new) > parts.broken.most:
        raise too_many([*known, *new], parts.broken.most)
    return new


def too_many(files: Sequence[str], most: int) -> UserError:
    """The error for more broken images than may be."""
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return UserError(
        f"{len(files)} image{' is' if len(files) == 1 else 's are'} broken, and data.max_broken={most}.",
        why=f"These cannot be decoded: {', '.join(files[:5])}{more}.",
        fix="Replace or delete the files, or raise data.max_broken.",
        key="data.max_broken",
    )
