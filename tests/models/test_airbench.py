from typing import Any

import pytest
import torch

from tests.models.test_init import info
from trainkit.common.errors import UserError
from trainkit.config.schema import ModelConfig
from trainkit.models import airbench
from trainkit.models.library import build_model


def built(side: int = 32, in_chans: int = 3, **options: Any) -> torch.nn.Module:
    chosen = ModelConfig.model_validate({"name": "airbench", **options})
    return build_model(chosen, info(side, in_chans, num_classes=10), 0)


def test_it_is_the_published_network_of_two_million_weights() -> None:
    convolutions = 12 * 24 + 24 + 9 * (24 * 64 + 64 * 64 + 64 * 256 + 256 * 256 + 256 * 256 + 256 * 256)
    norms = 2 * 2 * (64 + 256 + 256)
    head = 10 * 256
    assert sum(parameter.numel() for parameter in built().parameters()) == convolutions + norms + head


@pytest.mark.parametrize(("side", "in_chans"), [(32, 3), (28, 1), (9, 1), (64, 3)])
def test_images_of_other_sizes_get_a_score_for_each_class(side: int, in_chans: int) -> None:
    assert built(side, in_chans, width=8)(torch.rand(4, in_chans, side, side)).shape == (4, 10)


@pytest.mark.parametrize(("side", "width"), [(8, 64), (32, 0)])
def test_what_makes_no_network_is_refused(side: int, width: int) -> None:
    with pytest.raises(UserError, match="is not possible"):
        built(side, width=width)


def test_the_first_layer_gives_features_of_one_variance() -> None:
    def drawing(likeness: float, size: int) -> torch.Tensor:
        """A factor that makes noise alike from one place to the next."""
        place = torch.arange(size)
        factor: torch.Tensor = torch.linalg.cholesky(likeness ** (place[:, None] - place).abs())
        return factor

    torch.manual_seed(0)
    beside = drawing(0.93, 40)
    noise = torch.randn(100, 3, 40, 40)
    images = torch.einsum("ck,nkyx->ncyx", drawing(0.91, 3), beside @ noise @ beside.T)
    found = airbench.whitening(3)(images).detach().transpose(0, 1).flatten(1)
    variances = found.var(1)[:12].sort().values
    assert variances[0] > 0.3  # the faintest of all: noise is not made as strong as the rest
    assert ((variances[2:] > 0.9) & (variances[2:] < 1.1)).all()
    assert torch.allclose(found[:12], -found[12:], atol=1e-5)


def test_an_image_that_is_not_trained_on_is_looked_at_six_times() -> None:
    model = airbench.build(info(32, 3), width=4).eval()
    images = torch.randn(2, 3, 32, 32)
    looks = list[torch.Tensor]()
    next(model.children()).register_forward_pre_hook(lambda first, given: looks.append(given[0]))
    model(images)
    assert torch.stack(looks).shape == (6, *images.shape)
    assert torch.equal(looks[0], images)
    assert torch.equal(torch.stack(looks[::2]), torch.stack(looks[1::2]).flip(-1))
    assert torch.equal(looks[2][..., 1:, 1:], images[..., :-1, :-1])
    assert torch.equal(looks[4][..., :-1, :-1], images[..., 1:, 1:])
    model.train()
    model(images)
    assert len(looks) == 7
