"""Stderr of ranks, seldom as tidy as in a book."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.diagnosis.rank_log import RankLog

RAISED = """\
Traceback (most recent call last):
  File "/home/me/lab/train.py", line 9, in <module>
    main()
{}
"""


CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


HANDLED = "\nDuring handling of the above exception, another exception occurred:\n\n"


LOADER = """\
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/home/me/lab/data.py", line 44, in __getitem__
    raise ValueError("bad image 7")
ValueError: bad image 7
"""


KEY = "KeyError: 'x'"


ABORTED = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: bad\nframe #0"


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 2, in <module>
  |     raise ExceptionGroup('two', [error, KeyError('x')]) from None
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 1, in <module>
    |     1 / 0
    | ZeroDivisionError: division by zero
    +---------------- 2 ----------------
    | KeyError: 'x'
    +------------------------------------
"""


BAR = "  0%|          | 0/10 [00:00<?, ?it/s]\r 10%|#         | 1/10 [00:01<00:09, 1.0s/it]"


NOISE = (
    "[W1106 12:00:00.000000000 socket.cpp:464] [c10d] The server socket has failed to bind: Address already in use\n"
)


UNRAISED = f"""\
{RAISED.format("KeyError: 'dealt with'")}
going on
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 2, in <module>
  |     raise ExceptionGroup('two', [ValueError('a'), KeyError('x')])
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +---------------- 2 ----------------
    | KeyError: 'x'
    +------------------------------------
"""


@pytest.fixture
def stderr(tmp_path: Path) -> Path:
    return tmp_path / "rank-1.err"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param(BAR + RAISED.format(KEY), KEY, id="behind a progress bar"),
        pytest.param(RAISED.replace("\n", "\x1b[0m\n\x1b[31m").format(KEY), KEY, id="in colours"),
        pytest.param(RAISED.replace("\n", "\n[default1]:").format(KEY), KEY, id="torchrun --tee"),
        pytest.param("[rank1]: " + RAISED.replace("\n", "\n[rank1]: ").format(KEY), KEY, id="torch's prefix"),
        pytest.param("1: " + RAISED.replace("\n", "\n1: ").format(KEY), KEY, id="srun's label"),
        pytest.param("[1,0]<stderr>:" + RAISED.replace("\n", "\n[1,0]<stderr>:").format(KEY), KEY, id="mpirun's tag"),
        pytest.param(
            "(Worker pid=7, ip=10.0.0.2) " + RAISED.replace("\n", "\n(Worker pid=7, ip=10.0.0.2) ").format(KEY),
            KEY,
            id="ray's prefix",
        ),
        pytest.param(RAISED.format(LOADER), "ValueError: bad image 7", id="of a loader's worker"),
        pytest.param(RAISED.format(KEY) + NOISE * 20, KEY, id="with others after it"),
        pytest.param(GROUP, "ZeroDivisionError: division by zero", id="the first of a group"),
        pytest.param(UNRAISED, "ExceptionGroup: two (2 sub-exceptions)", id="a group of errors that nobody raised"),
        pytest.param(ABORTED, "CUDA error: bad", id="as C++ aborts"),
        pytest.param(
            RAISED.format(KEY) + "It wrote Traceback (most recent call last)\n", KEY, id="with a heading in a line"
        ),
    ],
)
def test_the_error_is_found(stderr: Path, text: str, error: str) -> None:
    stderr.write_text("some warning\n" + text)
    log = RankLog(stderr)
    assert log.error == error
    assert log.traceback is None or NOISE not in log.traceback.message, "others' words are no part of it"


BOXED = """\
╭──────────── Traceback (most recent call last) ────────────╮
│ /home/u/work/train.py:520 in <module>                      │
│                                                            │
│   519 if __name__ == "__main__":                           │
│ ❱ 520 │   main()                                           │
╰────────────────────────────────────────────────────────────╯
RuntimeError: Expected all tensors to be on the same device,
but found at least two devices, cuda:0 and cpu!
"""


def test_a_traceback_that_rich_has_drawn_is_read_as_one(stderr: Path) -> None:
    stderr.write_text(f"a warning\n{BOXED}\nwandb: synced\n")
    log = RankLog(stderr)
    error = (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    )
    assert log.error == error
    assert log.words[1] == '  File "/home/u/work/train.py", line 520, in <module>'
    assert "    main()" in log.words
    assert (8, error) in log.tail, "lines keep their numbers"


def test_bytes_that_are_no_text_hide_nothing(stderr: Path) -> None:
    stderr.write_bytes(os.urandom(10_000) + b"\n" + RAISED.format("KeyError: 'x'").encode() + os.urandom(1000))
    assert RankLog(stderr).error == "KeyError: 'x'"


def test_a_traceback_cut_off_is_none_and_an_older_one_ended_no_rank(stderr: Path) -> None:
    stderr.write_text(RAISED.format("KeyError: 'dealt with'") + RAISED[:70])
    assert RankLog(stderr).traceback is None


@pytest.mark.parametrize(("words", "caused"), [(CAUSE, True), (HANDLED, False)], ids=["raised from", "being handled"])
def test_an_error_is_caused_by_what_it_was_raised_from(stderr: Path, words: str, caused: bool) -> None:
    stderr.write_text(RAISED.format("OSError: disk") + words + RAISED.format("RuntimeError: not saved"))
    found = RankLog(stderr).traceback
    assert found is not None
    assert (found.error, found.first, "OSError" in found.causes) == ("RuntimeError: not saved", "OSError: disk", caused)


def test_a_crash_in_compiled_code_is_known_from_faulthandler(stderr: Path) -> None:
    with stderr.open("w") as file:
        subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", "import os; os.kill(os.getpid(), 11)"],
            stderr=file,
            check=False,
        )
    assert RankLog(stderr).crash[0] == "Segmentation fault"
    assert 'File "<string>", line 1' in "\n".join(RankLog(stderr).crash)


def test_of_an_endless_log_only_the_end_is_read(stderr: Path) -> None:
    with stderr.open("wb") as file:
        file.truncate(1 << 36)  # takes no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + RAISED.format("KeyError: 'x'").encode())
    log = RankLog(stderr)
    assert (log.error, log.tail[-1]) == ("KeyError: 'x'", (0, "KeyError: 'x'"))
