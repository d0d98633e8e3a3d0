import os
from pathlib import Path
from typing import Any

import pytest

from trainkit.common.errors import UserError
from trainkit.config import yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1E5", 1e5), ("1.5", 1.5), (".5", 0.5), ("3", 3), ("-3", -3), ("010", 10), ("1_000", "1_000"),
        ("0x10", "0x10"), ("no", "no"), ("on", "on"), ("Yes", "Yes"), ("true", True), ("False", False), ("null", None),
        ("~", None), ("", None), ("1:00:00", "1:00:00"), ("2:30", "2:30"), ("2026-01-31", "2026-01-31"), ("=", "="),
        ("[a, 1]", ["a", 1]), ("{a: 1e-3}", {"a": 1e-3}), ("'3'", "3"), ("a: b: c", "a: b: c"), ("[1", "[1"),
        ("*x", "*x"), ("!!python/name:os.system", "!!python/name:os.system"), ("!!str 3", "3"),
        ("9" * 5000, "9" * 5000), ("[" * 50, "[" * 50),
    ],
)  # fmt: skip
def test_a_value_is_what_people_mean_by_it(text: str, value: Any) -> None:
    parsed = yaml.parse_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


MANY = [1.5] * 21_841
"""A weight for each class of ImageNet's larger sibling."""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        *((nothing, {}) for nothing in ("", "# nothing but a comment\n", "---\n")),
        ("\ufeffseed: 1\n", {"seed": 1}),
        (f"train: {{class_weights: {MANY}}}\n", {"train": {"class_weights": MANY}}),
        ("optim: &o {lr: 1}\nschedule: *o\n", {"optim": {"lr": 1}, "schedule": {"lr": 1}}),
    ],
    ids=["empty", "a comment", "a document", "a byte order mark", "a long list", "aliases of few values"],
)
def test_what_a_file_may_hold(tmp_path: Path, text: str, values: dict[str, Any]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text, encoding="utf-8")
    assert yaml.read(file)[0] == values


def doubled(first: str, again: str) -> str:
    """Thirty lines that stand for a billion values."""
    return f"a0: &a0 {first}\n" + "".join(f"a{n}: &a{n} {again.replace('*', f'*a{n - 1}')}\n" for n in range(1, 31))


NOTHING = r"a.yaml:\d+ is not a value that settings can have\..*"
"""Files that are refused by their line, before they fill the memory."""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim:\n  lr: 1\n  name: sgd\n  lr: 2\n", r"'optim\.lr' occurs twice.*Lines 2 and 4"),
        *((text, r"a.yaml:\d+ is not valid YAML")
          for text in ("optim: [1\nseed: 2\n", "a: b: c\n", "\tseed: 1\n", "a: *x\n", "--- 1\n--- 2\n")),
        *((text, "has no settings") for text in ("- a\n- b\n", "just words\n", "3\n")),
        (doubled("[x, y]", "[*, *]"), f"{NOTHING}50,000 values"),
        (doubled("{x: 1, y: 2}", "{x: *, y: *}"), f"{NOTHING}50,000 values"),
        ("model:\n" + "".join(f"  k{n}: 1\n" for n in range(80_000)), f"{NOTHING}50,000 values"),
        (f"seed: {'9' * 5000}\n", f"{NOTHING}5,000 digits"),
        ("a: " + "[" * 500, f"{NOTHING}nested"),
        ("a: " + "{b: " * 500, f"{NOTHING}nested"),
        ("a: &a [*a]\n", f"{NOTHING}contains itself"),
        ("a: &a {b: *a}\n", f"{NOTHING}contains itself"),
        ("a: !!timestamp x\n", f"{NOTHING}not a valid setting"),  # PyYAML fails over it
        ("a: !!float '1:2'\n", f"{NOTHING}not a valid setting"),
        ("a: !!python/name:os.system\n", f"{NOTHING}not a valid setting"),
    ],
    ids=range(20),
)  # fmt: skip
def test_what_a_file_may_not_hold_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"(?s){says}"):
        yaml.read(file)


def test_a_file_that_is_no_text_or_has_many_gigabytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="Cannot read"):
        yaml.read(file)
    os.truncate(file, 300 << 30)
    with pytest.raises(UserError, match=r"(?s)a.yaml.*322,122,547,200 bytes.*1,048,576"):
        yaml.read(file)
