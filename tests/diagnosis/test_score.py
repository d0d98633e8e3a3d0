from __future__ import annotations

from collections import Counter

from tests.diagnosis.score import answers


def test_of_117_failures_from_public_threads_9_in_10_are_explained_and_none_is_explained_away() -> None:
    verdicts = Counter(answer.verdict for answer in answers())
    assert sum(verdicts.values()) == 117
    assert verdicts["right"] >= 106, verdicts
    assert [answer for answer in answers() if answer.verdict == "confidently wrong"] == []
