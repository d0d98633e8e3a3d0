"""Texts that programs have printed, each explained by one row of ``causes.yaml``."""

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.runs import TRACEBACK, diagnose
from tests.diagnosis.score import CORPUS, FRAMES, answer_to, answers, read_yaml, with_frames
from trainkit.diagnosis.causes import Cause, CauseRow, rows
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

HERE = Path(__file__).parent
RECORDED: dict[str, list[dict[str, Any]]] = {}
for file in sorted((HERE / "recorded").glob("*.yaml")):
    RECORDED |= read_yaml(file)
UNKNOWN: list[dict[str, Any]] = read_yaml(HERE / "unknown.yaml")


def named_rows() -> dict[str, CauseRow]:
    """The rows under their names; the second of a name is ``NAME.2``."""
    count = Counter[str]()
    found = {}
    for row in rows():
        count[row.name] += 1
        found[row.name if count[row.name] == 1 else f"{row.name}.{count[row.name]}"] = row
    return found


ROWS = named_rows()


def as_recorded(run: RunDir, said: dict[str, Any]) -> Cause:
    """The answer where a run has left what a recorded text holds."""
    for event in said.get("events", ()):
        append_event(run, event["event"], **{"attempt": 0, **event})
    if said.get("code") == "gone":
        run.code.symlink_to(run.path.parent / ".code" / "0123456789abcdef")
    if said.get("folder") == "gone":
        shutil.rmtree(run.path)
    cause = diagnose(run, **{key: said[key] for key in ("job", "batch", "rank", "nodes", "executor") if key in said})
    assert cause.evidence
    assert said.get("says", "") in cause.what
    assert said.get("command", "") in cause.command
    assert not re.search(r"[{}?]" if "says" in said else r"[{}]|--exclude *$", cause.what + cause.command)
    return cause


def test_each_row_has_a_recorded_text_and_one_command_without_a_placeholder() -> None:
    assert ROWS.keys() == RECORDED.keys()
    assert [name for name, texts in RECORDED.items() if not texts] == []
    assert [row.name for row in rows() if not row.command or "FOLDER" in row.command] == []


TEXTS = [(name, said) for name, texts in RECORDED.items() for said in texts]
IDS = [f"{name}-{said['from']}" for name, said in TEXTS]


@pytest.mark.parametrize(("name", "said"), TEXTS, ids=IDS)
def test_what_was_printed_is_explained_by_its_row_and_no_other(run: RunDir, name: str, said: dict[str, Any]) -> None:
    cause = as_recorded(run, said)
    assert cause.row is ROWS[name], f"{cause.row} takes it: {cause.what}"


LONG = FRAMES["deep"].rstrip("\n")
"""The frames of a real traceback of torch: more lines than a log's end was once read for."""
RAISES = re.compile(r"^(?P<prefix>\[rank\d\]: |)(?=[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b(:|$))", re.MULTILINE)
HEADING = re.compile(r"^(?P<prefix>\[rank\d\]: |)(Original )?Traceback \(most recent call last\):\n", re.MULTILINE)


def with_long_traceback(text: str) -> str:
    """The text with the frames of `LONG` in its last traceback, or before its bare exception."""
    headings = [*HEADING.finditer(text)]
    if headings:
        last = headings[-1]
        return with_frames(f"{text[: last.start()]}{last['prefix']}<<deep>>\n{text[last.end() :]}")
    return with_frames(RAISES.sub(lambda match: f"{match['prefix']}<<deep>>\n", text, count=1))


RAISED = [
    pytest.param(name, said, id=f"{name}-{said['from']}")
    for name, said in TEXTS
    if "Traceback (most" in with_long_traceback(said.get("rank", "")) and "code" not in said
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "said"), RAISED)
def test_a_long_traceback_hides_no_cause(run: RunDir, name: str, said: dict[str, Any]) -> None:
    """Real ones have 45 lines and more; others that ended nothing stand before and after them."""
    long = with_long_traceback(said["rank"])
    assert len(long.splitlines()) > 60
    handled = f"{LONG}\nRuntimeError: dealt with\ngoing on\n"
    ignored = f"\nException ignored in: <function Loader.__del__ at 0x7f>\n{LONG}\nAttributeError: 'NoneType' object\n"
    for text in (long, handled + long, long + ignored):
        cause = as_recorded(run, {**said, "rank": text})
        assert cause.row is ROWS[name], f"{cause.row} takes it: {cause.what}"


@pytest.mark.parametrize("said", UNKNOWN, ids=[f"{item['cause']}-{item['from']}" for item in UNKNOWN])
def test_what_no_row_explains_is_told_in_its_own_words(run: RunDir, said: dict[str, Any]) -> None:
    cause = as_recorded(run, said)
    assert (cause.name, cause.row) == (said["cause"], None), cause.what


@pytest.mark.nightly
def test_9_in_10_public_failures_are_explained_and_none_wrongly() -> None:
    verdicts = Counter(answer.verdict for answer in answers())
    assert sum(verdicts.values()) == 519
    assert verdicts["right"] >= 512, verdicts
    assert verdicts["confidently wrong"] == 0, [item for item in answers() if item.verdict == "confidently wrong"]


IN_A_LIBRARY = TRACEBACK.format('  File "/env/lib/python3.11/site-packages/lib/x.py", line 3, in f\n    g()')


@pytest.mark.nightly
def test_each_message_of_the_catalogue_has_its_cause(tmp_path: Path) -> None:
    wrong = []
    for name, told in read_yaml(CORPUS / "catalogue.yaml").items():
        texts = [("rank", IN_A_LIBRARY + text) for text in told.get("raised", ())]
        texts += [("rank", text) for text in told.get("printed", ())]
        texts += [("batch", text) for text in told.get("batch", ())]
        for index, (log, text) in enumerate(texts):
            said = {"id": f"{name}-{index}", "text": f"{text}\n", "exit": 1, "log": log, "kind": "", "cause_re": "."}
            answer = answer_to(said, tmp_path)
            if answer.name != name:
                wrong.append((name, answer.name, text))
    assert wrong == []
