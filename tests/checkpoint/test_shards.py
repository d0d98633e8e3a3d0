"""A tensor in several files: whole in the end, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainkit.checkpoint import format
from trainkit.checkpoint import tensors as checkpoint_tensors
from trainkit.checkpoint.format import BrokenCheckpointError, Record, file_name, stem_of
from trainkit.checkpoint.tensors import Entry, Stored, read_tensors

WHOLE = torch.arange(24.0).view(6, 4)


def part(rows: slice, columns: slice = slice(0, 4), whole: tuple[int, ...] = (6, 4)) -> tuple[Entry, Tensor]:
    value = WHOLE[rows, columns].contiguous()
    return Entry("w", value.dtype, tuple(value.shape), whole, (rows.start, columns.start)), value


def written(folder: Path, *parts: tuple[Entry, Tensor]) -> Record:
    """A checkpoint with each part in a file of its own."""
    partial, facts = format.begin(folder, 1), {}
    for index, (entry, value) in enumerate(parts):
        name = file_name("model", index, len(parts))
        held = checkpoint_tensors.as_bytes(value)
        with format.new_file(partial, name) as out:
            facts[name] = checkpoint_tensors.write(out, [entry], lambda _, held=held: held)  # type: ignore[misc]
    format.commit(folder, Record(1, {}, facts))
    return format.verified(folder, 1)


def test_parts_make_a_whole(tmp_path: Path) -> None:
    record = written(tmp_path, part(slice(0, 2)), part(slice(2, 6), slice(0, 1)), part(slice(2, 6), slice(1, 4)))
    assert torch.equal(read_tensors(tmp_path, record, "model")["w"], WHOLE)


def test_a_part_is_read_from_whatever_files_have_some_of_it(tmp_path: Path) -> None:
    record = written(tmp_path, part(slice(0, 2)), part(slice(2, 5)), part(slice(5, 6)))
    found = Stored(tmp_path, record, "model").read("w", (1, 2), (4, 2))
    assert torch.equal(found, WHOLE[1:5, 2:4])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part(slice(0, 2)), part(slice(3, 6))], "the parts of 'w' in model are no whole"),
        ([part(slice(0, 2)), part(slice(0, 2)), part(slice(2, 4))], "are no whole"),
        ([part(slice(0, 3)), part(slice(3, 6), whole=(7, 4))], "are no whole"),
        ([part(slice(4, 6), whole=(5, 4)), part(slice(0, 3), whole=(5, 4))], "lies outside of it"),
        ([part(slice(0, 3), whole=(-6, 4)), part(slice(3, 6))], "-6 is no size"),
    ],
    ids=["a gap", "one twice", "of another", "outside", "odd"],
)
def test_parts_that_make_no_whole_are_a_broken_checkpoint(
    tmp_path: Path, parts: list[tuple[Entry, Tensor]], words: str
) -> None:
    record = written(tmp_path, *parts)
    with pytest.raises(BrokenCheckpointError, match=words):
        Stored(tmp_path, record, "model")


def test_a_file_that_is_missing_is_a_broken_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, part(slice(0, 2)), part(slice(2, 6)))
    (format.path_of(tmp_path, 1) / file_name("model", 1, 2)).unlink()
    with pytest.raises(BrokenCheckpointError, match="No such file"):
        format.verified(tmp_path, 1)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("model.safetensors", "model"), ("model-00002-of-00016.safetensors", "model"),
        ("a-00002-of-3.safetensors", "a-00002-of-3"), ("x-00001-of-00002-y.safetensors", "x-00001-of-00002-y"),
    ],
)  # fmt: skip
def test_a_name_says_what_a_file_holds(name: str, stem: str) -> None:
    assert stem_of(name) == stem


def test_safetensors_own_library_reads_what_is_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "number": torch.tensor(3),
        "none": torch.zeros(0, 4),
        "mask": torch.tensor([[True], [False]]),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    format.write(tmp_path, 1, {"model": tensors}, {})
    found = load_file(format.path_of(tmp_path, 1) / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(
        value.dtype == tensors[name].dtype and torch.equal(value, tensors[name]) for name, value in found.items()
    )
