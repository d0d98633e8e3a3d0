from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.run.contributions import MOST_NAMES, OTHERS, Contribution, Contributions, Counted, file_of, typed
from trainkit.run.folder import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


def test_rounds_samples_hours_and_bytes_add_up_by_name_best_first() -> None:
    ledger = Contributions()
    ledger.add(60.0, [Counted("anna", 100, 5), Counted("bo", 300, 7)])
    ledger.add(60.0, [Counted("anna", 500, 5)])
    assert ledger.best_first() == [Contribution("anna", 2, 600, 120.0, 10), Contribution("bo", 1, 300, 60.0, 7)]


def test_two_peers_of_one_name_have_one_round_and_twice_the_hours() -> None:
    ledger = Contributions()
    ledger.add(60.0, [Counted("anna", 100), Counted("anna", 50)])
    assert ledger.best_first() == [Contribution("anna", 1, 150, 120.0)]


@pytest.mark.parametrize("weight", [0, -5, float("nan"), float("inf"), 1e300])
def test_a_weight_that_cannot_be_counts_for_nothing(weight: float) -> None:
    ledger = Contributions()
    ledger.add(60.0, [Counted("anna", weight)])
    assert ledger.best_first() == []


def test_a_restarted_run_goes_on_counting(run: RunDir) -> None:
    before = Contributions.of(run)
    before.add(60.0, [Counted("anna", 100, 5)])
    before.write(run)
    after = Contributions.of(run)
    after.add(60.0, [Counted("anna", 100, 5)])
    assert after.best_first() == [Contribution("anna", 2, 200, 120.0, 10)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"contributions": 3}', '{"contributions": [3, {"name": "x"}]}'])
def test_a_broken_file_is_none(run: RunDir, text: str) -> None:
    file_of(run).write_text(text)
    assert Contributions.of(run).best_first() == []


def test_names_are_plain_text_and_of_bounded_length() -> None:
    ledger = Contributions()
    ledger.add(60.0, [Counted("\x1b]0;evil\x07an\nna", 1), Counted("x" * 1000, 1)])
    assert [len(item.name) < 70 and item.name.isprintable() for item in ledger.best_first()] == [True, True]
    assert [item.name for item in typed([{"name": "a\nb", "rounds": 1, "samples": 1, "seconds": 1, "bytes": 1}])] == [
        "a b"
    ]


def test_there_is_no_end_of_names_and_an_end_of_memory_for_them() -> None:
    ledger = Contributions()
    ledger.add(1.0, [Counted(str(number), 1) for number in range(MOST_NAMES + 50)])
    assert len(ledger.best_first()) == MOST_NAMES + 1
    assert ledger.best_first()[0] == Contribution(OTHERS, 1, 50, 50.0)
