from __future__ import annotations

import pytest

from trainkit.collaborative import asking
from trainkit.collaborative.entry import by_address
from trainkit.errors import RunFailedError

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_a_swarm_that_takes_too_long_to_answer_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_SECONDS", 0.01)
    with pytest.raises(RunFailedError, match=r"no answer within 0\.01 s[\s\S]*jobs\.swarm doctor"):
        asking.run_at(by_address([ADDRESS], name="join"))
