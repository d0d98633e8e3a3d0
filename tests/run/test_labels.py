from pathlib import Path

import pytest

from trainkit.common import jsonl
from trainkit.common.errors import RefusedError, UserError
from trainkit.run.folder import RunDir
from trainkit.run.labels import Note, labels_of, note_of, require_said, say, shown_labels, tag_of, take_back


def test_tags_and_notes_are_added_and_taken_back(run: RunDir) -> None:
    say(run, tags=["paper", "baseline"], notes=["one", "two"])
    say(run, tags=["paper"])
    take_back(run, tags=["baseline"], note=1)
    say(run, notes=["three"])
    found = labels_of(run)
    assert (found.tags, [(note.number, note.text) for note in found.notes]) == (("paper",), [(2, "two"), (3, "three")])
    assert len(run.labels.read_text().splitlines()) == 7, "a tag that is there is not written again"


def test_what_is_not_there_cannot_be_taken_back(run: RunDir) -> None:
    with pytest.raises(UserError, match="no tag paper"):
        require_said(run, tags=["paper"])
    with pytest.raises(UserError, match="no note 1"):
        require_said(run, note=1)


@pytest.mark.parametrize("word", ["", "two words", "-x", "a,b", "a" * 65, "\x1b[31m", "#1"])
def test_a_tag_is_a_word_that_can_be_typed(word: str) -> None:
    with pytest.raises(UserError):
        tag_of(word)
    assert [tag_of(good) for good in ("paper", "v1.2", "größer", "a:b")] == ["paper", "v1.2", "größer", "a:b"]


def test_a_note_is_one_line_and_no_secret() -> None:
    assert note_of(" a\n b ") == "a b"
    for text in ("", " \n", "x" * 2001):
        with pytest.raises(UserError):
            note_of(text)
    with pytest.raises(RefusedError, match="looks like a secret"):
        note_of("password=hunter2secret9")


def test_what_strangers_wrote_is_shown_as_plain_text(run: RunDir) -> None:
    odd: list[dict[str, object]] = [{"tag": "\x1b]0;x\x07"}, {"tag": 3}, {"unnote": "1"}, {"untag": []}]
    odd += [{"note": "a\x1b[2Jb", "time": "x"}]
    for raw in odd:
        jsonl.append_jsonl(run.labels, raw)
    assert labels_of(run) == ((), (Note(1, 0.0, "ab"),))


def test_a_link_in_its_place_is_neither_read_nor_written(run: RunDir, tmp_path: Path) -> None:
    (key := tmp_path / "key").write_text('{"note": "secret"}\n')
    run.labels.symlink_to(key)
    assert shown_labels(run).notes == ()
    with pytest.raises(UserError):
        labels_of(run)
    with pytest.raises(UserError):
        say(run, notes=["x"])
    assert key.read_text() == '{"note": "secret"}\n'
