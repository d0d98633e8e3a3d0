from __future__ import annotations

import pytest

from trainkit.errors import RunFailedError
from trainkit.swarm import reader
from trainkit.swarm.admission import by_address

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_a_swarm_that_takes_too_long_to_answer_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_SECONDS", 0.01)
    with pytest.raises(RunFailedError, match=r"no answer within 0\.01 s[\s\S]*jobs\.swarm doctor"):
        reader.run_at(by_address([ADDRESS], name="join"))
