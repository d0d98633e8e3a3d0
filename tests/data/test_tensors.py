from __future__ import annotations

import pytest
import torch

from trainkit.data.tensors import Resize, ShiftFlip, TensorSamples, tensor_transforms


def gradient(size: int = 8) -> torch.Tensor:
    return torch.arange(1, size * size + 1, dtype=torch.uint8).reshape(1, size, size)


def test_samples_are_images_and_plain_labels() -> None:
    samples = TensorSamples(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([5, 6, 7]))
    image, label = samples[1]
    assert (len(samples), image.shape, label, type(label)) == (3, (1, 2, 2), 6, int)


def test_a_shifted_image_is_a_window_of_the_padded_one() -> None:
    image = gradient()
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    windows = [padded[:, y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
    shift = ShiftFlip(2, flip=False)
    shifted = [shift(image) for _ in range(300)]
    seen = {next(i for i, window in enumerate(windows) if torch.equal(window, one)) for one in shifted}
    assert len(seen) == 25  # each window comes up


def test_half_of_the_images_are_mirrored() -> None:
    flip = ShiftFlip(0, flip=True)
    image = gradient()
    mirrored = sum(torch.equal(flip(image), image.flip(-1)) for _ in range(400))
    assert 140 < mirrored < 260


def test_the_image_itself_is_not_changed() -> None:
    image = gradient()
    ShiftFlip(1, flip=True)(image).fill_(0)
    assert torch.equal(image, gradient())


@pytest.mark.parametrize("size", [4, 8, 20])
def test_resizing_gives_bytes_of_the_asked_size(size: int) -> None:
    resized = Resize(size)(gradient())
    assert (resized.shape, resized.dtype) == ((1, size, size), torch.uint8)


def test_without_augmentation_training_sees_what_evaluation_sees() -> None:
    train, evaluate = tensor_transforms(8, augment=False, shift=1, flip=True)
    assert torch.equal(train(gradient()), evaluate(gradient()))
