"""Samples in a tar file as webdataset's: members whose names are alike up to the first dot of the file's name.

A sample has one image. Its class is in its member that ends in ``.cls``, else it is the folder that the image is in.
Nothing is lost without a word: what cannot be decided is refused, and what cannot be read is counted.
"""

from __future__ import annotations

import posixpath
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.data import decoding, image_files, image_kinds, losses
from trainkit.data.download import members, opened_tar
from trainkit.data.image_kinds import LeftOut
from trainkit.data.losses import LostSamples

LARGEST_IMAGE, LONGEST_LABEL = 1 << 28, 200
_BEGINNING = 4 << 20
"""Bytes of an image that are looked at; its header is among them."""
MEASURED = 64
"""Images of a shard whose sizes are looked at."""
_LONGEST_CHAIN = 8
"""Links to links."""
_RENAMED = "tar --transform='s/[.]\\([^/]*[.]\\)/-\\1/'"
"""Writes cat-17.jpg for cat.17.jpg."""


class Image(NamedTuple):
    """An image in a file of many, and its class."""

    start: int
    size: int
    crc: int
    label: str


def are_numbers(labels: Iterable[str]) -> bool:
    """Return whether all labels are numbers of classes."""
    return all(label.isdecimal() and len(label) < 6 for label in labels)


class About(NamedTuple):
    """Facts on a file of samples beside where its images lie."""

    taken: str
    """Extensions of the members that are the images, or their column."""
    labels_by: str
    """The place of its classes: ``cls``, ``folder`` or ``column``; empty without any."""
    numbers: bool
    """Its classes are numbers, not names."""
    lost: LeftOut
    """Samples that training does not see."""
    unread: LeftOut
    """Other members, which are no samples."""

    @classmethod
    def checked(cls, taken: str, labels_by: str, numbers: bool, lost: Any, unread: Any) -> About:
        """Check what an index says, which may be a stranger's. Raises ValueError or TypeError for what is none."""
        left = (losses.from_pairs(lost), losses.from_pairs(unread))
        return cls(terminal.one_line(taken, 200), str(labels_by), bool(numbers), *left)

    @classmethod
    def of_before(cls, labels: Sequence[str]) -> About:
        """Facts for an index that is older than they are: labels counted as numbers where all looked like some."""
        numbers = are_numbers(labels) and all(label == str(int(label)) for label in labels)
        return cls("", "", numbers, {}, {})


class Found(NamedTuple):
    """The samples of a file."""

    images: list[Image]
    sides: list[int]
    """The shorter sides of its first images."""
    about: About


class _Content(NamedTuple):
    """Facts on a regular member."""

    start: int
    size: int
    crc: int
    is_image: bool
    text: str
    """The class that it names."""


_NOTHING = _Content(0, 0, 0, False, "")


@dataclass
class _Sample:
    """Members of one key."""

    key: str
    images: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Members that may be images by their content."""


def extension(name: str) -> str:
    """The part of a member's name behind the first dot of its file's name, in small letters."""
    return posixpath.basename(name).partition(".")[2].lower()


class TarReader:
    """Reads one tar file forward, once.

    Args:
        where: its name, for errors.
        wanted: the extension of the images, or several, the first that a sample has; none: as the names say.
        most_bytes: see `trainkit.data.download.members`.
    """

    def __init__(self, where: str, wanted: Sequence[str], most_bytes: int) -> None:
        self.where = where
        self.wanted = [word.lower().lstrip(".") for word in wanted]
        self.most_bytes = most_bytes
        self.lost = LostSamples()
        self.unread = LostSamples()
        self._contents: dict[str, _Content] = {}
        self._links: dict[str, str] = {}
        self._samples: dict[str, _Sample] = {}
        self._sides: list[int] = []
        self._extensions: dict[str, str] = {}
        """Extension of the images that are taken -> one of them."""
        self._beside: dict[str, str] = {}
        """Extension of images that are not taken -> one of them."""

    def read(self, stream: Any) -> Found:
        """Read all of it. Raises UserError for what cannot be decided, and for what is out of all proportion."""
        last = ""
        with opened_tar(stream) as tar:
            for member in members(tar, self.most_bytes):
                name = posixpath.normpath(member.name)
                if member.isdir():
                    continue
                if name in self._contents or name in self._links:
                    fix = "Write the file again: tar appends a member with the same name instead of replacing it."
                    raise refused(self.where, f"{_shown(name)} is in it twice", fix)
                is_known = self._take(tar, member, name)  # of a hidden one too: links may lead to it
                if any(part.startswith(".") or part in image_files.FOREIGN for part in name.split("/")):
                    self.unread.note(losses.HIDDEN, name)
                elif not is_known:
                    self.unread.note(losses.NO_SAMPLE, name)
                else:
                    key = posixpath.join(posixpath.dirname(name), posixpath.basename(name).partition(".")[0])
                    self._sort_in(key, name, is_new=key != last)
                    last = key
            self._require_end(tar)
        return self._found()

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> bool:
        """Note what a member holds, or where it leads; return whether it may be part of a sample."""
        is_class = extension(name) == "cls"
        why = image_kinds.why_not(name)
        if member.islnk() or member.issym():
            folder = posixpath.dirname(name) if member.issym() else ""
            self._links[name] = posixpath.normpath(posixpath.join(folder, member.linkname))
            return is_class or not why
        if not member.isfile() or (why and not is_class):
            return False
        if member.size > (LONGEST_LABEL if is_class else LARGEST_IMAGE):
            if why is None:
                return False
            raise refused(self.where, f"{_shown(name)} has {member.size:,} bytes", "Leave it out.")
        content: Any = tar.extractfile(member)
        beginning = content.read(_BEGINNING)
        crc = zlib.crc32(beginning)
        for block in iter(lambda: content.read(_BEGINNING), b""):  # never all of it: several shards are read at once
            crc = zlib.crc32(block, crc)
        text = ""
        is_image = not is_class and decoding.is_image(beginning)
        if is_class:
            try:
                text = beginning.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                why = f"{_shown(name)} names a class and is not UTF-8 at byte {error.start + 1}"
                raise refused(self.where, why, "Write class names in UTF-8.") from None
        if is_image and len(self._sides) < MEASURED:
            self._sides += decoding.shorter_sides([beginning])
        self._contents[name] = _Content(member.offset_data, member.size, crc, is_image, text)
        return True

    def _sort_in(self, key: str, name: str, *, is_new: bool) -> None:
        """Add a member to its sample, which is of one piece."""
        if is_new and key in self._samples:
            fix = f"Write the members of a sample side by side (tar --sort=name), or rename the files ({_RENAMED})."
            why = f"{_shown(name)} belongs to {_shown(key)}, but other samples lie between them"
            raise refused(self.where, why, fix)
        sample = self._samples.setdefault(key, _Sample(key))
        if extension(name) == "cls":
            sample.classes.append(name)
        elif image_kinds.is_image(name):
            sample.images.append(name)
        else:
            sample.unknown.append(name)

    def _require_end(self, tar: tarfile.TarFile) -> None:
        """Refuse a file that is cut short, and one in which more follows behind the end: a reader stops there."""
        rest: Any = tar.fileobj
        end = tar.offset
        for block in iter(lambda: rest.read(1 << 20), b""):
            if block.count(0) != len(block):
                why = "Data follows after its end, where readers stop: it is damaged, or several files were joined"
                fix = "Copy it again. Join archives with `tar --concatenate --file=FIRST SECOND`, not with cat."
                raise refused(self.where, why, fix)
        if rest.pos < end + tarfile.BLOCKSIZE:
            fix = "Copy it again. If it is complete, append the end mark: head -c 1024 /dev/zero >> FILE."
            raise refused(self.where, "It is truncated: it has no end mark", fix)

    def _content(self, name: str) -> _Content:
        """Find the content of a member, through links to others."""
        for _ in range(_LONGEST_CHAIN):
            name = self._links.get(name, name)
        return self._contents.get(name, _NOTHING)

    def _found(self) -> Found:
        """Decide which image is each sample's, and of which class."""
        targets = set(self._links.values())
        chosen: list[tuple[_Sample, str, _Content]] = []
        for sample in self._samples.values():
            name = self._image_of(sample, targets)
            if name is None:
                continue
            content = self._content(name)
            if content is _NOTHING:
                self.lost.note(losses.LOST_LINK, name)
            elif not content.is_image:
                self.lost.note(losses.NOT_AN_IMAGE, name)
            else:
                chosen.append((sample, name, content))
        self._refuse_mixture()
        has_classes = any(sample.classes for sample, _, _ in chosen)
        images: list[Image] = []
        for sample, name, content in chosen:
            label = posixpath.basename(posixpath.dirname(name))
            if has_classes:
                label = "".join(self._content(member).text for member in sample.classes[:1])
            if label:
                images.append(Image(content.start, content.size, content.crc, label))
            else:
                self.lost.note(losses.NO_LABEL, sample.key)
        labels_by = ""
        if images:
            labels_by = "cls" if has_classes else "folder"
        numbers = labels_by == "cls" and are_numbers(image.label for image in images)
        taken = ", ".join(sorted(self._extensions)[:5])
        return Found(images, self._sides, About(taken, labels_by, numbers, self.lost, self.unread))

    def _image_of(self, sample: _Sample, targets: set[str]) -> str | None:
        """The member that is a sample's image; None where it has none."""
        names = list(sample.images)
        for name in sample.unknown:
            if not sample.images and name not in targets and self._content(name).is_image:
                names.append(name)
            else:
                self.unread.note(losses.NO_SAMPLE, name)
        if not names:
            if sample.classes:
                self.lost.note(losses.NO_IMAGE, sample.key)
            return None
        chosen = self._chosen(sample, names)
        if chosen is None:
            self.lost.note(f"without a member .{', .'.join(self.wanted)}", sample.key)
            return None
        self._extensions.setdefault(extension(chosen), chosen)
        for other in names:
            if other != chosen:
                self._beside.setdefault(extension(other), other)
                self.unread.note(losses.BESIDE, other)
        return chosen

    def _chosen(self, sample: _Sample, names: list[str]) -> str | None:
        if self.wanted:
            by_extension = {extension(name): name for name in names}
            found = filter(None, map(by_extension.get, self.wanted))
            return next(found, None)
        plain = [name for name in names if "." not in extension(name)]
        if len(plain) == 1 or len(names) == 1:
            return (plain or names)[0]
        several = ", ".join(_shown(posixpath.basename(name)) for name in names[:4])
        why = f"{_shown(sample.key)} has {len(names)} images, {several}: a key ends at the first dot"
        fix = f"Rename the files so that each name has one dot: {_RENAMED}."
        choice = extension((plain or names)[0])
        if not any(part.isdecimal() for part in choice.split(".")):  # cat.17.jpg
            fix = f"Choose one by its extension, such as data.image={choice}; or rename the files ({_RENAMED})."
        raise refused(self.where, why, fix)

    def _refuse_mixture(self) -> None:
        """Refuse a file in which a mask is one sample's image, and beside that of another."""
        both = sorted(self._extensions.keys() & self._beside.keys())
        if both and not self.wanted:
            alone = _shown(self._extensions[both[0]])
            beside = _shown(self._beside[both[0]])
            choices = [*sorted(self._extensions.keys() - {both[0]}), both[0]]
            fix = f"Choose the images by their extension, such as data.image={choices[0]}."
            raise refused(self.where, f"{alone} is alone, and {beside} is not the image of its sample", fix)


def refused(where: str, why: str, fix: str) -> UserError:
    """The error for a file that cannot be read as a shard."""
    return UserError(f"{where} is not a shard of images.", why=f"{why}.", fix=fix, key="data.url")


def _shown(name: str) -> str:
    return repr(terminal.one_line(name, 150))
