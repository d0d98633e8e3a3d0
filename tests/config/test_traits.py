from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainkit.config.checks import StrategyTraits, strategy_traits
from trainkit.errors import UserError


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("ddp", StrategyTraits()),
        ("fsdp", StrategyTraits()),
        ("single", StrategyTraits(ranks="one")),
        ("dp", StrategyTraits(ranks="one", gpus_per_rank="all")),
        ("hivemind", StrategyTraits(loop="collaborative")),
    ],
)
def test_a_strategy_says_itself_what_others_must_know(name: str, traits: StrategyTraits) -> None:
    assert strategy_traits(name) == traits


def test_a_trait_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "two_ranks.py").write_text('RANKS = "two"\ndef build(dist): ...\n')
    with pytest.raises(UserError, match=r"states RANKS = 'two'") as refused:
        strategy_traits("two_ranks:build")
    assert refused.value.key == "strategy.name"
