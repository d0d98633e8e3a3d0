from __future__ import annotations

import subprocess
import sys

import pytest

from trainkit.plugins import timm_models, torchvision_models


def test_every_model_of_timm_is_found_and_nothing_else() -> None:
    import timm
    from timm.models._registry import _deprecated_models

    found = set(timm_models())
    assert set(timm.list_models()) <= found
    assert found - set(timm.list_models()) <= set(_deprecated_models)


def test_no_pretrained_weights_of_timm_would_be_refused() -> None:
    import timm

    for full_name in timm.list_models(pretrained=True):
        name, _, tag = full_name.partition(".")
        tags = timm_models()[name]
        assert not tag or not tags or tag in tags, full_name


def test_every_classification_model_of_torchvision_is_found_and_nothing_else() -> None:
    import torchvision

    assert list(torchvision_models()) == torchvision.models.list_models(module=torchvision.models)


@pytest.mark.parametrize("function", ["timm_models", "torchvision_models"])
def test_asking_imports_neither_library_and_is_quick(function: str) -> None:
    script = f"""
import sys, time
started = time.process_time()
from trainkit.plugins import {function}
assert len({function}()) > 50
print(time.process_time() - started, [name for name in ("torch", "timm", "torchvision") if name in sys.modules])
"""
    seconds, loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split(" ", 1)
    assert loaded.strip() == "[]"
    assert float(seconds) < 0.4  # 0.06 on an idle machine
