"""What a job does with the check of its nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.site.test_node_health import a_report
from trainkit.launch.restarts import culprits, passing_failure, pronounce
from trainkit.run.events import Attempt, history_of
from trainkit.run.folder import PREFLIGHT, RunDir


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt.begin(RunDir.create(tmp_path / "run", "seed: 0\n"))


def _found(attempt: Attempt, *bad: str) -> None:
    report = a_report("n1", "n2", "n3")
    for facts in report["ranks"].values():
        if facts["node"] in bad:
            facts["memory_free_mb"] = 7
    PREFLIGHT.at(attempt.logs).write_text(f"a library's own words\n{json.dumps(report)}\n")


def test_good_nodes_let_the_ranks_start(attempt: Attempt) -> None:
    _found(attempt)
    assert pronounce(attempt) == 0
    assert history_of(attempt.run).failures == ()


def test_a_bad_node_ends_the_attempt_which_another_one_without_it_may_mend(
    attempt: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    _found(attempt, "n2")
    assert pronounce(attempt) == 3
    assert "BAD  n2: memory: 7 MB" in capsys.readouterr().out
    assert passing_failure(attempt, 3) == "failed preflight: n2: memory: 7 MB of 64000 free"
    assert culprits(attempt, ["n1", "n2", "n3"], {}) == {"n2": "failed preflight: memory: 7 MB of 64000 free"}


@pytest.mark.parametrize("said", ["", "srun: error", '{"ranks": torn'])
def test_a_check_without_an_answer_holds_nothing_back(attempt: Attempt, said: str) -> None:
    PREFLIGHT.at(attempt.logs).write_text(said)
    assert pronounce(attempt) == 0
    assert culprits(attempt, ["n1"], {}) == {}
