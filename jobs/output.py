"""Output of commands for programs, by ``--json``: answers alone on stdout, and all words on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TextIO

from trainkit.common.errors import TrainkitError
from trainkit.common.jsonl import finite

if TYPE_CHECKING:
    from jobs.shapes import Answer

_OUT: list[TextIO] = []


@contextmanager
def for_programs(argv: Sequence[str]) -> Iterator[None]:
    """Keep stdout for answers while the block runs, where a command line asks for ``--json``."""
    words = list(argv)
    if "--json" not in words[: words.index("--") if "--" in words else None]:
        yield
        return
    _OUT.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _OUT.pop().flush()


def is_on() -> bool:
    """Return True while a program is answered."""
    return bool(_OUT)


def stream() -> TextIO:
    """Return the stream of answers; stdout where people are told."""
    return _OUT[-1] if _OUT else sys.stdout


def emit(answer: Answer | Sequence[Answer], *, a_line: bool = False) -> None:
    """Print an answer, or a list of them: as a document, or on one line. What is not finite becomes null."""
    plain = finite([item.plain() for item in answer] if isinstance(answer, Sequence) else answer.plain())
    print(json.dumps(plain, indent=None if a_line else 2, allow_nan=False), file=stream(), flush=True)


def emit_error(error: TrainkitError) -> None:
    """Print an error as an answer."""
    from jobs.shapes import ErrorAnswer, ToldError

    emit(ErrorAnswer(error=ToldError(what=error.what, why=error.why, fix=error.fix, exit_code=error.exit_code)))
