from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.config.loading import load

PROFILES = sorted((Path(__file__).parents[2] / "configs" / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_every_cluster_profile_loads_and_is_outranked_by_flags(profile: Path) -> None:
    flags = {"launch.cluster": (profile.stem, "--cluster"), "launch.time": ("5", "--time")}
    loaded = load("ddp", flags=flags)
    assert loaded.config.launch.time == "5"
    assert any(source.kind == "cluster profile" for source in loaded.sources.values())
