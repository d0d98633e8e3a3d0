"""ImageNet (ILSVRC 2012), JPEG files in ROOT/imagenet/{train,val}/WNID, as everybody lays it out."""

import io
import os
from pathlib import Path
from typing import IO, Any, cast

from trainkit.common.errors import UserError
from trainkit.data import download
from trainkit.data.base import Splits
from trainkit.data.download import Say, complete_folder, opened_tar, regular
from trainkit.data.folders import Layout, read_splits, require_splits
from trainkit.data.image_files import Files, list_images
from trainkit.data.photo_transforms import Photos, photo_splits

TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SHAPE = {"num_classes": 1000, "train_size": 1_281_167}
MD5S = {
    TRAIN: "1d675b47d978889d74fa0da5fadfb00e",
    VAL: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}


def build(files: Files, *, image_size: int = 224, augment: bool = True) -> Splits:
    """1,281,167 + 50,000 photos of 1,000 classes. The labels of the test images were never published: test is val.

    Augmented by a random part of the photo and mirroring; evaluated on the centre.
    """
    classes, (train, val) = read_splits(files, ("train", "val"))
    return photo_splits("imagenet", classes, (train, val, val), Photos(image_size=image_size, augment=augment))


def layout(root: Path, **options: Any) -> Layout:
    """The folder of the images, and its splits."""
    is_inside = (root / "train").is_dir() and not (root / "imagenet").is_dir()
    return root if is_inside else root / "imagenet", ("train", "val")


def locate(root: Path, **options: Any) -> None:
    """Check that both splits are there."""
    fix = f"Put the archives of image-net.org into {root} and unpack them"
    require_splits("imagenet", root, layout(root), "WNID", fix)


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Unpack the archives into their layout. What is there already is left; an interrupted call goes on."""
    final = root / "imagenet"
    if download.is_there(final, ("train", "val"), say):
        return
    todo = [name for name, split in ((TRAIN, "train"), (VAL, "val")) if not (final / split).is_dir()]
    download.require_names(archives, MD5S)
    names = [*todo, DEVKIT] if VAL in todo else todo
    paths = {name: download.given_or_in(root, name, archives) for name in names}
    absent = [name for name in names if paths[name] is None]
    if absent:
        why = f"ImageNet can only be downloaded with your own account; neither --archive nor {root} has it."
        fix = f"Fetch it from https://image-net.org (ILSVRC 2012), put it into {root}, and repeat this command."
        raise UserError(f"There is no {' and no '.join(absent)} to unpack.", why=why, fix=fix)
    train, val, kit = map(paths.get, (TRAIN, VAL, DEVKIT))
    classes = read_devkit(kit, say) if kit else []  # before the long work: it may be broken
    if train:
        _unpack_train(train, final / "train", say)
    if val:
        _unpack_val(val, final / "val", classes, say)


def read_devkit(archive: Path, say: Say) -> list[str]:
    """The class (WNID) of each validation image, in the order of their numbers."""
    from scipy.io import loadmat  # type: ignore[import-untyped]  # comes with scikit-learn

    download.note_other(archive, MD5S[DEVKIT], say)
    content: dict[str, bytes] = {}
    with opened_tar(archive) as tar:
        for member in regular(tar, 1 << 28):
            name = Path(member.name).name
            if name in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt"):
                content[name] = cast(IO[bytes], tar.extractfile(member)).read()
    try:
        synsets = loadmat(io.BytesIO(content["meta.mat"]), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
        return [wnids[int(line)] for line in content["ILSVRC2012_validation_ground_truth.txt"].split()]
    except (KeyError, ValueError, TypeError, IndexError) as error:
        why = f"Its meta.mat or validation_ground_truth.txt is missing or different ({type(error).__name__}: {error})."
        raise download.other_archive(archive, "development kit of ILSVRC 2012", why, f"{DEVKIT} (2.5 MB)") from None


def _unpack_train(archive: Path, final: Path, say: Say) -> None:
    """An archive of one archive for each class. A class is complete or absent, so an interrupted call goes on."""
    download.note_other(archive, MD5S[TRAIN], say)
    say(f"Unpacking {archive}")
    with complete_folder(final, keep=True) as partial, opened_tar(archive) as outer:
        for count, member in enumerate(regular(outer, 1 << 38), start=1):
            wnid, suffix = os.path.splitext(Path(member.name).name)
            if suffix != ".tar" or (partial / wnid).is_dir():
                continue
            packed = cast(IO[bytes], outer.extractfile(member))
            with complete_folder(partial / wnid) as folder, opened_tar(packed) as inner:
                for image in regular(inner, 1 << 33):
                    download.extract(inner, image, folder, Path(image.name).name)
            if count % 50 == 0:
                say(f"  {count} classes")
        _require_images(archive, TRAIN, partial)
    say(f"{final} is complete.")


def _unpack_val(archive: Path, final: Path, classes: list[str], say: Say) -> None:
    """An archive of images, whose classes are in the development kit."""

    def name_of(member: Path) -> str | None:
        number = member.stem.rpartition("_")[2]  # ILSVRC2012_val_00000001.JPEG
        if not (number.isascii() and number.isdecimal()):
            return None
        if not 1 <= int(number) <= len(classes):
            what = f"{archive} and the development kit do not belong together."
            why = f"{member} is image {int(number)}; the kit knows {len(classes)}."
            raise UserError(what, why=why, fix=f"Use {VAL} and {DEVKIT} of the same year, 2012.")
        return f"{classes[int(number) - 1]}/{member.name}"

    download.note_other(archive, MD5S[VAL], say)
    with download.unpacked(archive, final, name_of, 1 << 35, say) as folder:
        _require_images(archive, VAL, folder)


def _require_images(archive: Path, name: str, folder: Path) -> None:
    if not list_images(folder):
        right = f"{name} from https://image-net.org"
        why = f"It contains no images, unlike the official {name}."
        raise download.other_archive(archive, "archive of ImageNet", why, right)
