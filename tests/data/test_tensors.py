from __future__ import annotations

import pytest
import torch
from torchvision.transforms.v2 import functional

from trainkit.data import order
from trainkit.data.loader import TensorSamples, TensorTransform, tensor_transforms

KEYS = order.keys(0, 0, torch.arange(400))


def gradient(size: int = 8) -> torch.Tensor:
    return torch.arange(1, size * size + 1, dtype=torch.uint8).reshape(1, size, size)


def noise(count: int, channels: int, height: int, width: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=random)


def test_samples_are_images_and_plain_labels() -> None:
    samples = TensorSamples(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([5, 6, 7]))
    image, label = samples[1]
    assert (len(samples), image.shape, label, type(label)) == (3, (1, 2, 2), 6, int)
    assert samples.nbytes == 3 * (4 + 8)


@pytest.mark.parametrize(("shift", "flip"), [(4, True), (2, False), (0, True), (1, True)])
def test_each_image_of_a_batch_is_what_torchvision_makes_of_it_with_the_same_draws(shift: int, flip: bool) -> None:
    images = noise(400, 3, 12, 9)
    transform = TensorTransform(12, shift, flip)
    drawn = transform.draw(KEYS)
    expected = []
    for image, (top, left, mirror) in zip(images, drawn.tolist(), strict=True):
        cropped = functional.crop(functional.pad(image, [shift] * 4), top, left, 12, 9)
        cropped = functional.horizontal_flip(cropped) if mirror else cropped
        expected.append(functional.resize(cropped, [12, 12], antialias=True))
    assert torch.equal(transform.batch(images, drawn), torch.stack(expected))


def test_one_image_alone_is_what_a_batch_of_one_gives() -> None:
    transform = TensorTransform(8, 2, True)
    torch.manual_seed(3)
    key = torch.randint(1 << 62, (1,))
    torch.manual_seed(3)
    assert torch.equal(transform(gradient()), transform.batch(gradient()[None], transform.draw(key))[0])


def test_every_window_comes_up_as_often_and_half_are_mirrored() -> None:
    drawn = TensorTransform(8, 2, True).draw(order.keys(1, 1, torch.arange(10_000)))
    counts = torch.bincount(drawn @ torch.tensor([10, 2, 1]), minlength=50)
    assert len(counts) == 50
    assert ((counts - 200).abs() < 80).all()


def test_the_images_themselves_are_not_changed() -> None:
    images = gradient()[None].repeat(400, 1, 1, 1)
    transform = TensorTransform(8, 1, True)
    transform.batch(images, transform.draw(KEYS)).fill_(0)
    assert torch.equal(images, gradient()[None].repeat(400, 1, 1, 1))


@pytest.mark.parametrize("size", [4, 8, 20])
def test_resizing_gives_bytes_of_the_asked_size(size: int) -> None:
    resized = TensorTransform(size)(gradient())
    assert (resized.shape, resized.dtype) == ((1, size, size), torch.uint8)


def test_without_augmentation_training_sees_what_evaluation_sees() -> None:
    train, evaluate = tensor_transforms(8, augment=False, shift=1, flip=True)
    assert torch.equal(train(gradient()), evaluate(gradient()))
