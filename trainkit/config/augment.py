"""How training images are changed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from trainkit.config.section import Section

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class AugmentConfig(Section):
    """Of whole batches on the device, after what the data set does itself (shift or crop, mirror)."""

    rand_augment_ops: Annotated[int, Field(ge=0, le=10)] = 0
    """RandAugment: operations an image, 2 as a rule; 0: none."""
    rand_augment_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """How strong each of them is."""
    random_erasing_prob: Probability = 0.0
    """Of an image to lose a random rectangle."""
    random_erasing_mode: Literal["const", "rand", "pixel"] = "const"
    """What comes there: the mean colour, a random one, or noise."""
    mixup_alpha: NonNegativeFloat = 0.0
    """Mixup: of the Beta distribution that the share of an image is drawn from, 0.2 to 1 as a rule; 0: none."""
    cutmix_alpha: NonNegativeFloat = 0.0
    """CutMix, the same; 1 as a rule. With mixup, each pair of images gets one of the two."""
    mixup_prob: Probability = 1.0
    """Of a pair to be mixed by either."""
    mixup_switch_prob: Probability = 0.5
    """Of CutMix instead of mixup, where both are on."""

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, in pairs."""
        return (self.mixup_alpha > 0 or self.cutmix_alpha > 0) and self.mixup_prob > 0
