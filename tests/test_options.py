from __future__ import annotations

from typing import Any, Literal

import pytest

from trainkit.errors import UserError
from trainkit.plugins import convert, fill


def plugin(
    root: str, *, size: int = 8, rate: float = 0.1, norm: Literal["group", "batch"] = "group", extra: Any = 3
) -> None:
    pass


def test_what_is_not_given_has_its_default() -> None:
    assert fill(plugin, {"size": 9}, where="data") == {"size": 9, "rate": 0.1, "norm": "group", "extra": 3}


def test_arguments_that_are_no_options_are_left_out() -> None:
    assert "root" not in fill(plugin, {}, where="data")


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, "int", 3),
        (3.0, "int", 3),
        (3, "float", 3.0),
        (True, "bool", True),
        ("x", "str", "x"),
        (8, "str", "8"),
        (None, "int | None", None),
        (4, "int | None", 4),
        ("auto", "int | str", "auto"),
        ("group", "Literal['group', 'batch']", "group"),
        ([1, 2], "tuple[int, ...]", [1, 2]),
    ],
)
def test_a_value_of_the_declared_type_is_taken(value: object, annotation: str, expected: object) -> None:
    converted = convert(value, annotation, key="data.x")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "wanted"),
    [
        ("big", "int", "a whole number"),
        (3.5, "int", "a whole number"),
        (float("inf"), "int", "a whole number"),
        (True, "int", "a whole number"),
        (1, "bool", "true or false"),
        ("yes", "bool", "true or false"),
        (None, "float", "a number"),
        ("x", "float | None", "a number or null"),
        ([1], "str", "text"),
    ],
)
def test_a_value_of_another_type_is_refused_by_key(value: object, annotation: str, wanted: str) -> None:
    with pytest.raises(UserError, match=rf"data\.x=[\s\S]*data\.x is {wanted}\."):
        convert(value, annotation, key="data.x")


def test_a_choice_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"one of: group, batch[\s\S]*Did you mean 'group'\?"):
        fill(plugin, {"norm": "grop"}, where="model")
