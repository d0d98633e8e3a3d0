"""Settings of runs that earlier versions of trainkit began, as today's configuration has them."""

from trainkit.config.layers import DEFAULT, Layer

_GONE = ("collaborative.give_code",)
"""Settings that no training depends on."""


def in_todays_words(layer: Layer) -> Layer:
    """The settings of a run's file, which is complete: what it lacks is of a version that did not know it."""
    today = {key: item for key, item in layer.items() if key not in _GONE}
    name, source = layer.get("optim.name", ("", DEFAULT))
    if name == "muon":
        today.setdefault("optim.muon_as", ("timm", source))
    return today
