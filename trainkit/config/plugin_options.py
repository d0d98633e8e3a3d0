"""Options of plugins: the keyword-only parameters of their functions, with types and defaults.

A parameter without default whose type is a dataclass stands for the fields of that.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from trainkit.common.errors import UserError, did_you_mean

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "None": NoneType}


def option_type(annotation: str) -> Any:
    """The type that an annotation in a plugin's source says; None for one whose values are not checked.

    Understands int, float, bool, str, None, Literal and unions of them.
    """
    literal = re.fullmatch(r"Literal\[(.*)\]", annotation)
    if literal:
        return Literal[ast.literal_eval(f"({literal[1]},)")]
    parts = re.split(r"\s*\|\s*", annotation.strip())
    if not set(parts) <= _TYPES.keys():
        return None
    return functools.reduce(operator.or_, map(_TYPES.__getitem__, parts))


def by_options(build: Callable[..., Any]) -> Callable[..., Any]:
    """A plugin's function as it is called: by options, of which it gets those of each dataclass together."""
    if not inspect.isfunction(build):
        return build
    names = inspect.unwrap(build).__globals__
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for it in inspect.signature(build).parameters.values():
        kind = names.get(it.annotation) if isinstance(it.annotation, str) else it.annotation
        if it.kind is it.KEYWORD_ONLY and it.default is it.empty and dataclasses.is_dataclass(kind):
            groups[it.name] = kind
            fields = inspect.signature(kind).parameters.values()  # type: ignore[arg-type]
            parameters += [field.replace(kind=it.KEYWORD_ONLY) for field in fields]
        else:
            parameters.append(it)

    @functools.wraps(build)
    def grouped(*args: Any, **options: Any) -> Any:
        for name, kind in groups.items():
            given = {key: options.pop(key) for key in inspect.signature(kind).parameters if key in options}
            options[name] = kind(**given)
        return build(*args, **options)

    grouped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return grouped if groups else build


def fill(build: Callable[..., Any], options: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """All keyword-only parameters of ``build`` with the values of ``options`` or their defaults.

    ``where`` is the configuration section, for messages.
    """
    filled = dict(options)
    for it in inspect.signature(build).parameters.values():
        if it.kind is not it.KEYWORD_ONLY:
            continue
        if it.name in options:
            annotation = it.annotation
            if not isinstance(annotation, str):
                annotation = getattr(annotation, "__name__", str(annotation))
            filled[it.name] = convert(options[it.name], annotation, key=f"{where}.{it.name}")
        elif it.default is not it.empty:
            filled[it.name] = it.default
    return filled


def convert(value: Any, annotation: str, *, key: str) -> Any:
    """``value`` as ``annotation`` wants it, or a UserError that names ``key``."""
    from pydantic import TypeAdapter, ValidationError  # most commands do without

    kind = option_type(annotation)
    if kind is None:
        return value
    # YAML has told 1, 1.0, true and text apart already. What is exact is accepted: 3 for a float, 3.0 for an int.
    same = [value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value % 1 == 0:
            same.append(int(value))
        same.append(str(value))
    for candidate in same:
        with contextlib.suppress(ValidationError):
            return TypeAdapter(kind).validate_python(candidate, strict=True)
    choices = list[str]()
    if get_origin(kind) is Literal:
        choices += map(str, get_args(kind))
        words = choices[0]
        wanted = f"one of: {', '.join(choices)}"
    else:
        words = " or ".join(map(_WORDS.__getitem__, get_args(kind) or (kind,)))
        wanted = words
    shown = value
    if value is None or isinstance(value, bool):
        shown = json.dumps(value)
    fix = did_you_mean(str(value), choices, otherwise=f"Give {words}.")
    raise UserError(f"{key}={shown} is not possible.", why=f"{key} is {wanted}.", fix=fix, key=key)


class Signature(NamedTuple):
    """Options that a plugin's function accepts."""

    options: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    takes_any: bool = True  # it has **kwargs
    annotations: Mapping[str, str] = {}  # as written in the source
    defaults: Mapping[str, Any] = {}  # those that are literals
    doc: str = ""


def class_signature(kind: type) -> Signature:
    """The arguments of a class of a library beyond its first one, all of them options by name."""
    options = list[str]()
    required = list[str]()
    annotations: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    takes_any = False
    for it in list(inspect.signature(kind).parameters.values())[1:]:
        if it.kind is it.VAR_KEYWORD:
            takes_any = True
        elif it.kind is not it.VAR_POSITIONAL:
            options.append(it.name)
            if it.default is it.empty:
                required.append(it.name)
            else:
                defaults[it.name] = it.default
            if it.annotation is not it.empty:
                annotations[it.name] = _optional(inspect.formatannotation(it.annotation))
    return Signature(tuple(options), tuple(required), takes_any, annotations, defaults, inspect.getdoc(kind) or "")


def _optional(annotation: str) -> str:
    return re.sub(r"Optional\[(\w+)\]", r"\1 | None", annotation)


def signature_of(node: ast.FunctionDef, fields_of: Callable[[str], list[ast.stmt]]) -> Signature:
    """The options of a function.

    Args:
        fields_of: the statements of the dataclass that an annotation names; none where it names something else.
    """
    options = list[str]()
    required = list[str]()
    annotations: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    docs = [ast.get_docstring(node) or ""]

    def add(name: str, annotation: ast.expr | None, default: ast.expr | None) -> None:
        options.append(name)
        if annotation is not None:
            annotations[name] = _optional(ast.unparse(annotation))
        if default is None:
            required.append(name)
        else:
            add_literal(defaults, name, default)

    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        body: list[ast.stmt] = []
        if isinstance(argument.annotation, ast.Name) and default is None:
            body = fields_of(argument.annotation.id)
        if not body:
            add(argument.arg, argument.annotation, default)
        for field, after in pairwise([*body, None]):
            if isinstance(field, ast.AnnAssign):
                add(ast.unparse(field.target), field.annotation, field.value)
                if isinstance(after, ast.Expr):
                    docs.append(f"``{options[-1]}``: {ast.literal_eval(after.value)}")
    return Signature(
        tuple(options), tuple(required), node.args.kwarg is not None, annotations, defaults, "\n\n".join(docs)
    )


def add_literal(values: dict[str, Any], name: str, value: ast.expr) -> None:
    """Add a value to the others, if it is a literal."""
    with contextlib.suppress(ValueError, TypeError):
        values[name] = ast.literal_eval(value)


def check_against(sig: Signature, name: str, options: Mapping[str, Any], *, where: str) -> None:
    """Check options as `check_options` does, by a signature."""
    for option, value in options.items():
        key = f"{where}.{option}"
        if option in sig.annotations:
            convert(value, sig.annotations[option], key=key)
        if option not in sig.options and not sig.takes_any:
            why = f"{where} '{name}' has: {', '.join(sig.options) or 'no options'}."
            fix = did_you_mean(key, [f"{where}.{item}" for item in sig.options], otherwise=f"Remove '{key}'.")
            raise UserError(f"Unknown key '{key}'.", why=why, fix=fix, key=key)
    for option in sig.required:
        if option not in options:
            what = f"{where} '{name}' needs '{where}.{option}'."
            fix = f"Add {where}.{option}=VALUE."
            raise UserError(what, why="It has no default.", fix=fix, key=f"{where}.name")
