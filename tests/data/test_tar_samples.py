"""Samples in tar files as real tools write them: each is counted, or named with the reason why it is not."""

import io
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import prepare
from tests.data.samples import choice
from tests.data.shards import PNG, add, picture, tar_file, write_shard
from trainkit.common.errors import UserError
from trainkit.data.losses import BESIDE, HIDDEN, LOST_LINK, NO_IMAGE, NO_LABEL, NO_SAMPLE, NOT_AN_IMAGE
from trainkit.data.registry import build_data, counts_of, prepare_data
from trainkit.data.shards import Piece, index

A, B, C = (picture(number) for number in (1, 2, 3))


def read(members: dict[str, bytes], image: str | None = None, **more: Any) -> Piece:
    """The index of a tar file with these members."""
    return index("x.tar", iter([tar_file(members)]), "x.tar", (image, None), **more)


def taken(piece: Piece) -> list[tuple[int, str]]:
    """CRC and class of each sample."""
    return [(crc, piece.labels[label]) for _, _, crc, label in piece.records.tolist()]


CAT = {"cat/0.depth.png": A, "cat/0.png": B, "cat/1.depth.png": A, "cat/1.png": C}


@pytest.mark.parametrize(
    ("members", "image", "expected", "unread"),
    [
        (CAT, None, [B, C], {BESIDE: (2, "cat/0.depth.png")}),
        (CAT, "depth.png", [A, A], {BESIDE: (2, "cat/0.png")}),
        (CAT, ".PNG", [B, C], {BESIDE: (2, "cat/0.depth.png")}),
        ({"cat/0.rgb.png": A, "cat/0.png": B, "cat/1.rgb.png": C}, "rgb.png;png", [A, C], {BESIDE: (1, "cat/0.png")}),
        ({"cat/0.jpg": A, "cat/0.txt": b"", "dog/1.tif": B}, None, [A, B], {NO_SAMPLE: (1, "cat/0.txt")}),
        ({"./cat/0.png": A, "./cat/._0.png": b"", "__MACOSX/cat/0.png": B}, None, [A], {HIDDEN: (2, "cat/._0.png")}),
        ({"cat/17.left.png": A}, None, [A], {}),
        ({"cat/0001": A, "cat/0002.image": B}, None, [A, B], {}),
    ],
)  # fmt: skip
def test_the_image_of_a_sample_is_the_one_that_is_called_so(
    members: dict[str, bytes], image: str | None, expected: list[bytes], unread: dict[str, tuple[int, str]]
) -> None:
    piece = read(members, image)
    assert [crc for crc, _ in taken(piece)] == [zlib.crc32(content) for content in expected]
    assert (piece.about.unread, piece.about.lost) == (unread, {})


@pytest.mark.parametrize(
    ("members", "says", "fix"),
    [
        ({f"cat/cat.{at}.png": A for at in range(4)}, "'cat/cat' has 4 images, 'cat.0.png'", "one dot: tar"),
        ({"cat/0.jpg": A, "cat/0.png": B}, "'cat/0' has 2 images", "data.image=jpg"),
        ({"cat/0.left.png": A, "cat/0.right.png": B}, "'cat/0' has 2 images", "data.image=left.png"),
        ({"a/0.png": A, "a/0.mask.png": B, "a/1.mask.png": B}, "'a/1.mask.png' is alone", "data.image=png"),
        ({"a/0.png": A, "a/1.png": A, "a/0.mask.png": B}, "'a/0.mask.png' belongs to 'a/0'", "--sort=name"),
        ({"cat.0.png": A, "dog.0.png": A, "cat.1.png": A}, "'cat.1.png' belongs to 'cat'", "--transform"),
        ({"a/0.png": A, "./a/0.png": B}, "'a/0.png' is in it twice", "Write the file again"),
        ({"0.png": A, "0.cls": "größer".encode("latin-1")}, "'0.cls' names a class and is not UTF-8", "in UTF-8"),
    ],
)  # fmt: skip
def test_what_a_second_image_means_is_asked_and_not_guessed(members: dict[str, bytes], says: str, fix: str) -> None:
    with pytest.raises(UserError, match=r"x\.tar is not a shard of images") as caught:
        read(members)
    assert says in caught.value.why
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("members", "lost"),
    [({"0.png": A, "0.cls": b"1", "1.png": B}, {NO_LABEL: (1, "1")}),
     ({"0.png": A, "0.cls": b"1", "x/1.png": B, "x/2.png": B}, {NO_LABEL: (2, "x/1")}),
     ({"0.png": A, "0.cls": b"1", "1.png": B, "1.cls": b" \n"}, {NO_LABEL: (1, "1")}),
     ({"0.png": A, "0.cls": b"1", "1.cls": b"1", "1.npy": B}, {NO_IMAGE: (1, "1")}),
     ({"a/0.png": A, "a/1.png": b"<html>"}, {NOT_AN_IMAGE: (1, "a/1.png")})],
)  # fmt: skip
def test_a_sample_without_an_image_or_a_class_is_counted_as_lost(
    members: dict[str, bytes], lost: dict[str, tuple[int, str]]
) -> None:
    piece = read(members)
    assert (len(piece.records), piece.about.lost) == (1, lost)


def linked(*links: tuple[str, bytes, str], first: bool = False) -> Piece:
    """A tar file with the images cat/0.png and dog/0.png and some links, before or behind them."""
    out = io.BytesIO()

    def add_links(tar: tarfile.TarFile) -> None:
        for name, kind, target in links:
            member = tarfile.TarInfo(name)
            member.type = kind
            member.linkname = target
            tar.addfile(member)

    with tarfile.open(fileobj=out, mode="w") as tar:
        if first:
            add_links(tar)
        add(tar, {"cat/0.png": A, ".store/b": B, "dog/0.png": B})
        if not first:
            add_links(tar)
    return index("x.tar", iter([out.getvalue()]), "x.tar")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("kind", "target", "content"),
    [
        (tarfile.LNKTYPE, "cat/0.png", A), (tarfile.LNKTYPE, "./cat/0.png", A), (tarfile.SYMTYPE, "../cat/0.png", A),
        (tarfile.SYMTYPE, "0.png", B), (tarfile.SYMTYPE, "../.store/b", B),
    ],
)  # fmt: skip
def test_a_link_is_the_image_that_it_leads_to_of_its_own_class(
    kind: bytes, target: str, content: bytes, first: bool
) -> None:
    piece = linked(("dog/1.png", kind, target), first=first)
    expected = [(zlib.crc32(A), "cat"), (zlib.crc32(B), "dog"), (zlib.crc32(content), "dog")]
    assert sorted(taken(piece)) == sorted(expected)
    assert piece.about.lost == {}


@pytest.mark.parametrize("target", ["/photos/1.png", "2.png", "1.png", "../../../etc/passwd", "../cat"])
def test_a_link_that_leads_out_of_its_archive_is_lost_and_counted(target: str) -> None:
    assert linked(("dog/1.png", tarfile.SYMTYPE, target)).about.lost == {LOST_LINK: (1, "dog/1.png")}


def joined(one: bytes, other: bytes) -> bytes:
    return one + other


def without_end(one: bytes, other: bytes) -> bytes:
    return one[: len(one.rstrip(b"\0")) // 512 * 512 + 512]


def damaged(one: bytes, other: bytes) -> bytes:
    at = one.index(b"cat/1.png")
    return one[:at] + b"?" + one[at + 1 :]


def cut_in_a_header(one: bytes, other: bytes) -> bytes:
    return one[: one.index(b"cat/1.png") + 300]


@pytest.mark.parametrize(
    ("change", "says"),
    [(joined, "Data follows"), (damaged, "bad checksum"), (without_end, "no end"), (cut_in_a_header, "truncated")],
)
def test_what_lies_behind_an_end_or_a_damaged_header_is_not_lost_silently(
    change: Callable[[bytes, bytes], bytes], says: str, tmp_path: Path
) -> None:
    one = write_shard(tmp_path / "a.tar", {"cat/0.png": A, "cat/1.png": B}).read_bytes()
    other = write_shard(tmp_path / "b.tar", {"dog/0.png": C}).read_bytes()
    index("x.tar", iter([one]), "x.tar")
    with pytest.raises(UserError, match=r"x\.tar") as caught:
        index("x.tar", iter([change(one, other)]), "x.tar")
    assert says in caught.value.why


# Whole data sets


def stream(folder: Path, shards: dict[str, dict[str, bytes]], **given: Any) -> Any:
    """The data set of these shards, prepared."""
    for name, members in shards.items():
        write_shard(folder / "tars" / name, members)
    prepare_data("stream", folder, [], lambda line: None, {"url": str(folder / "tars"), **given})
    return choice("stream", folder, url=str(folder / "tars"), **{**given, "image_size": 16})


def of_classes(*names: str) -> dict[str, bytes]:
    return {f"{name}/{at}.png": picture(at) for name in names for at in range(2)}


def test_numbers_of_folders_are_names_and_those_of_members_are_numbers(tmp_path: Path) -> None:
    folders = of_classes("00000", "00014", "7")
    named = build_data(stream(tmp_path / "a", {"train-0.tar": folders, "val-0.tar": of_classes("00014")}))
    assert named.info.class_names == ("00000", "00014", "7")
    assert [named.val[at][1] for at in range(2)] == [1, 1]
    members = {"0.png": A, "0.cls": b"00", "1.png": B, "1.cls": b"02"}
    numbered = build_data(stream(tmp_path / "b", {"train-0.tar": members, "val-0.tar": {"0.png": A, "0.cls": b"2"}}))
    assert numbered.info.class_names == ("0", "1", "2")
    assert ([numbered.train[at][1] for at in range(2)], numbered.val[0][1]) == ([0, 2], 2)


CLS = {"0.png": A, "0.cls": b"0", "1.png": B, "1.cls": b"1"}


@pytest.mark.parametrize(
    ("train", "test", "left_out"),
    [(CLS, {"8.png": A, "9.png": B}, {NO_LABEL: (2, "test-0.tar")}),
     (CLS, {"images/8.png": A}, {"without a .cls member, which the training images have": (1, "test-0.tar")}),
     (of_classes("cat", "dog"), {"test/8.png": A},
      {"in folders that are not training classes (test)": (1, "test-0.tar")})],
)  # fmt: skip
def test_a_test_split_without_labels_is_left_out_and_said(
    train: dict[str, bytes], test: dict[str, bytes], left_out: dict[str, tuple[int, str]], tmp_path: Path
) -> None:
    config = stream(tmp_path, {"train-0.tar": train, "val-0.tar": train, "test-0.tar": test})
    counts = counts_of(config)
    assert (counts["train"].images, counts["test"].images) == (len(build_data(config).train), 0)
    assert counts["test"].left_out == left_out
    assert "val is used instead" in counts["test"].in_words()


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ({"train-0.tar": of_classes("cat", "dog"), "val-0.tar": of_classes("cow")}, "the class 'cow'"),
        ({"train-0.tar": of_classes("cat", "dog"), "val-0.tar": of_classes("cat"),
          "test-0.tar": of_classes("cat", "cow")}, "the class 'cow'"),
        ({"train-0.tar": CLS, "val-0.tar": of_classes("0", "1")}, "name their classes in two ways"),
        ({"train-0.tar": of_classes("cat"), "val-0.tar": of_classes("cat")}, "does not contain a folder per class"),
        ({"train-0.tar": CLS, "train-1.tar": {"2.png": A, "2.cls": b"0", "3.png": A}, "val-0.tar": CLS},
         r"1 without a label \(train-1.tar: 3\)"),
    ],
)  # fmt: skip
def test_what_training_would_refuse_or_miss_is_refused_when_it_is_prepared(
    shards: dict[str, dict[str, bytes]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        stream(tmp_path, shards)
    assert not list(tmp_path.glob("stream/*/shards.index"))


def test_a_compressed_shard_is_refused_and_files_of_no_split_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "tars"
    for name in ("train-0.tar", "val-0.tar", "extra-0.tar"):
        write_shard(folder / name, of_classes("cat", "dog"))
    said: list[str] = []
    prepare_data("stream", tmp_path, [], said.append, {"url": str(folder)})
    assert "Left out: 1 without the name of a split (extra-0.tar)." in said
    (folder / "train-1.tar.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"train-1\.tar\.gz is compressed"):
        prepare_data("stream", tmp_path / "again", [], said.append, {"url": str(folder)})


def test_a_shard_that_was_mended_is_read_again(tmp_path: Path) -> None:
    good, mixed = of_classes("cat", "dog"), {"cat/a.0.png": A, "cat/a.1.png": B}
    with pytest.raises(UserError, match="'cat/a' has 2 images"):
        stream(tmp_path, {"train-0.tar": good, "train-1.tar": mixed, "val-0.tar": good})
    mended = {"cat/a-0.png": A, "cat/a-1.png": B, "dog/0.png": C}
    config = stream(tmp_path, {"train-0.tar": of_classes("cat", "dog", "emu"), "train-1.tar": mended})
    assert counts_of(config)["train"][:2] == (9, 3)
    assert len(build_data(config).train[8][0]) == 3


def test_prepare_says_what_it_reads_and_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    masks = {f"cat/{at}.mask.png": PNG for at in range(2)}
    train = dict(sorted({**of_classes("cat", "dog"), **masks}.items()))
    write_shard(tmp_path / "tars" / "train-0.tar", train)
    write_shard(tmp_path / "tars" / "val-0.tar", {**of_classes("cat", "dog"), "dog/9.png": b""})
    with pytest.raises(UserError, match="1 sample of tars would be lost") as caught:
        prepare.main(["stream", "data.url=tars"], {})
    assert "data.max_broken=1" in caught.value.fix
    for _ in range(2):  # when it is there already as well
        assert prepare.main(["stream", "data.url=tars", "data.max_broken=1"], {}) == 0
        said = capsys.readouterr().out
        beside = "left out: 2 beside the image of their sample (train-0.tar: cat/0.mask.png)"
        assert f"train: 4 images of 2 classes; 1 shard, images: png; {beside}." in said
        assert "val: 4 images of 2 classes; 1 shard, images: png; left out: 1 whose content is not an image" in said
        assert "test: none; val is used instead." in said
