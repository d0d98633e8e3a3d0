from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainkit.config.loading import load
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv
from trainkit.strategies import build_strategy


def test_a_function_that_returns_no_strategy_is_told_what_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_strategy.py").write_text("def make(dist):\n    return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = load("single", ["strategy.name=odd_strategy:make"]).config.strategy
    with pytest.raises(UserError, match="It returned int, which has no parallelize and no grad_sync"):
        build_strategy(chosen, Distributed(RankEnv.single(), torch.device("cpu")))
