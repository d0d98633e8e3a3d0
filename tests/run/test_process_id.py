from __future__ import annotations

import os

import pytest

from trainkit.run.lease import ProcessId


def test_a_process_is_told_to_others_in_one_word() -> None:
    me = ProcessId.of(os.getpid())
    assert ProcessId.seen_from_here(me.word()) == me


@pytest.mark.parametrize("word", ["", "client", "{pid}", "{pid}:1", "0:1"])
def test_a_word_of_a_process_that_is_not_here_names_none(word: str) -> None:
    assert ProcessId.seen_from_here(word.format(pid=os.getpid())) is None
