"""Images: found, counted, decoded, ordered, batched. For data sets of your own: what they return."""

from trainkit.common.image_input import DataInfo, ModelInput
from trainkit.data.base import Samples, Splits

__all__ = ["DataInfo", "ModelInput", "Samples", "Splits"]
