from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.config import yaml
from trainkit.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("1.5", 1.5),
        (".5", 0.5),
        ("3", 3),
        ("-3", -3),
        ("010", 10),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("1:00:00", "1:00:00"),
        ("2:30", "2:30"),
        ("2026-01-31", "2026-01-31"),
        ("=", "="),
        ("[a, 1]", ["a", 1]),
        ("{a: 1e-3}", {"a": 1e-3}),
        ("'3'", "3"),
        ("a: b: c", "a: b: c"),
        ("[1", "[1"),
        ("*x", "*x"),
        ("!!python/name:os.system", "!!python/name:os.system"),
        ("!!str 3", "3"),
        ("9" * 5000, "9" * 5000),
        ("[" * 50, "[" * 50),
    ],
)
def test_a_value_is_what_people_mean_by_it(text: str, value: Any) -> None:
    parsed = yaml.parse_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


def test_every_key_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# first\nseed: 1\noptim:\n  lr: 1\n\n  name: sgd\nmodel: {name: x, depth: 3}\n")
    values, lines = yaml.read(file)
    assert values == {"seed": 1, "optim": {"lr": 1, "name": "sgd"}, "model": {"name": "x", "depth": 3}}
    assert lines == {
        "seed": 2,
        "optim": 3,
        "optim.lr": 4,
        "optim.name": 6,
        "model": 7,
        "model.name": 7,
        "model.depth": 7,
    }


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_a_file_without_settings_is_fine(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert yaml.read(file)[0] == {}


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("optim:\n  lr: 1\n  name: sgd\n  lr: 2\n")
    with pytest.raises(UserError, match=r"(?s)'optim\.lr' stands twice.*Lines 2 and 4"):
        yaml.read(file)


@pytest.mark.parametrize("text", ["optim: [1\nseed: 2\n", "a: b: c\n", "\tseed: 1\n", "a: *x\n", "--- 1\n--- 2\n"])
def test_a_broken_file_is_refused_with_the_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"{file}:\d+ is not valid YAML"):
        yaml.read(file)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "3\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match="holds no settings"):
        yaml.read(file)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="Cannot read"):
        yaml.read(file)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert yaml.read(file)[0] == {"seed": 1}


@pytest.mark.parametrize(
    "value",
    ["no", "3e-4", "010", "1:00:00", "", " a ", "null", "true", "a: b", "# x", "two\nlines", "it's", "é", "-", "[a"],
)
def test_text_stays_the_same_text_through_a_file(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.dump({"value": value}), encoding="utf-8")
    assert yaml.read(file)[0] == {"value": value}


@pytest.mark.parametrize("value", [1, 1.5, 1e-5, 3e20, True, None, [1, 2], {"a": []}])
def test_a_value_stays_the_same_value_through_a_file(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.dump({"value": value}))
    assert yaml.read(file)[0] == {"value": value}


def doubled(first: str, again: str) -> str:
    """Thirty lines that stand for a billion values."""
    return f"a0: &a0 {first}\n" + "".join(f"a{n}: &a{n} {again.replace('*', f'*a{n - 1}')}\n" for n in range(1, 31))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(doubled("[x, y]", "[*, *]"), "50,000 values", id="lists of aliases"),
        pytest.param(doubled("{x: 1, y: 2}", "{x: *, y: *}"), "50,000 values", id="mappings of aliases"),
        pytest.param("model:\n" + "".join(f"  k{n}: 1\n" for n in range(80_000)), "50,000 values", id="keys"),
        pytest.param(f"seed: {'9' * 5000}\n", "5,000 digits", id="digits"),
        pytest.param("a: " + "[" * 1000, "nested", id="depth"),
        pytest.param("a: " + "{b: " * 1000, "nested", id="depth of mappings"),
        pytest.param("a: &a [*a]\n", "holds itself", id="a circle"),
        pytest.param("a: &a {b: *a}\n", "holds itself", id="a circle of mappings"),
        pytest.param("a: !!timestamp x\n", "no kind of setting", id="a tag that PyYAML fails over"),
        pytest.param("a: !!float '1:2'\n", "no kind of setting", id="a number of YAML 1.1"),
        pytest.param("a: !!python/name:os.system\n", "no kind of setting", id="a tag of Python"),
    ],
)
def test_what_would_fill_the_memory_is_refused_by_its_line(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"(?s)a.yaml:\d+ is nothing that settings hold\..*{why}"):
        yaml.read(file)


def test_a_file_of_many_gigabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    with file.open("wb") as out:
        out.truncate(300 << 30)
    with pytest.raises(UserError, match=r"(?s)a.yaml.*322,122,547,200 bytes.*1,048,576"):
        yaml.read(file)


def test_a_list_with_a_weight_for_each_class_of_a_large_data_set_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"train: {{class_weights: [{', '.join(['1.5'] * 21_841)}]}}\n")
    assert len(yaml.read(file)[0]["train"]["class_weights"]) == 21_841


def test_aliases_of_few_values_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("optim: &o {lr: 1}\nschedule: *o\n")
    assert yaml.read(file)[0] == {"optim": {"lr": 1}, "schedule": {"lr": 1}}
