"""The page of the reference on Python, generated from the docstrings of what `trainkit` and its rooms hand to users."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise

import trainkit
from trainkit.data.batches import RankBatches
from trainkit.launch.flags import LaunchFlags
from trainkit.training.saved import State
from trainkit.training.user_rank import Rank

VERBS = ("submit", "open", "compare", "Run", "rank", "log", "UserError")
"""What `trainkit` hands to users, in the order of the page."""
OF_RANK = (Rank, State, RankBatches)
"""What `trainkit.rank` and its methods give."""
ROOMS = {
    "trainkit.data": "trainkit.data.base",
    "trainkit.tasks": "trainkit.tasks.base",
}
"""Module that code of users imports from -> the one that it was until version 0.2."""
SECTION = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)
LONGEST = 100


def parts() -> Iterator[str]:
    """The page below its head."""
    assert set(VERBS) == set(trainkit.__all__), "VERBS here does not fit"
    for name in VERBS:
        found = getattr(trainkit, name)
        yield f"## trainkit.{name}"
        if name != "UserError":
            yield signature(f"trainkit.{name}", found)
        yield from words(found)
        if name == "submit":
            names = ", ".join(f"`{flag}`" for flag in LaunchFlags.__annotations__)
            yield f"`LaunchFlags` are the [settings of launch](settings.md#launch): {names}."
        if name == "Run":
            yield from members(found)
        if name == "rank":
            for kind in OF_RANK:
                yield f"### {kind.__name__}"
                yield from words(kind)
                yield from members(kind)
    for room, former in ROOMS.items():
        module = importlib.import_module(room)
        yield f"## {room}"
        yield f"For [code of your own](../own.md). Code that imports these from `{former}` keeps working."
        for name in module.__all__:
            found = getattr(module, name)
            if not inspect.isclass(found):
                continue
            yield f"### {name}"
            if dataclasses.is_dataclass(found):
                yield signature(f"{room}.{name}", found)
            yield from words(found)
            if dataclasses.is_dataclass(found):
                yield fields(found)
            if inspect.isabstract(found):
                yield from members(found)


def members(kind: type) -> Iterator[str]:
    """Properties and methods of a class for users, in the order of its file."""
    for name, found in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(found) or isinstance(found, property)):
            continue
        yield f"### {kind.__name__}.{name}"
        if inspect.isfunction(found):
            yield signature(name, found)
        yield from words(found)


def fields(kind: type) -> str:
    """Fields of a dataclass that have a docstring, as a list."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    lines = []
    for field, after in pairwise(tree.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            lines.append(f"- `{field.target.id}`: {_markdown(' '.join(str(after.value.value).split()))}")
    return "\n".join(lines)


def signature(name: str, found: object) -> str:
    """A call with parameters, types and defaults, on one line or one parameter a line."""
    said = inspect.signature(found)  # type: ignore[arg-type]
    texts = []
    is_named = False
    for parameter in parameters(found):
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_named:
            texts.append("*")
            is_named = True
        is_named = is_named or parameter.kind is parameter.VAR_POSITIONAL
        texts.append(_parameter(parameter))
    end = ")"
    if said.return_annotation not in (inspect.Signature.empty, None, "None"):
        end = f") -> {_type(said.return_annotation)}"
    line = f"{name}({', '.join(texts)}{end}"
    if len(line) > LONGEST:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + end
    return f"```python\n{line}\n```"


def parameters(found: object) -> list[inspect.Parameter]:
    """Parameters of a function. Those that it takes by a TypedDict stand for themselves, but for launch's."""
    said = [*inspect.signature(found).parameters.values()]  # type: ignore[arg-type]
    unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(said[-1].annotation)) if said else None
    if unpacked is None:
        return said
    more = said.pop()
    for name, hint in getattr(inspect.getmodule(found), unpacked[1]).__annotations__.items():
        if name not in LaunchFlags.__annotations__:
            said.append(inspect.Parameter(name, more.KEYWORD_ONLY, annotation=f"{hint.__forward_arg__} = ..."))
    return [*said, more.replace(annotation="Unpack[LaunchFlags]")]


def _parameter(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.kind is parameter.VAR_POSITIONAL:
        text = f"*{text}"
    elif parameter.kind is parameter.VAR_KEYWORD:
        text = f"**{text}"
    if parameter.annotation is not parameter.empty:
        text += f": {_type(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = parameter.default
        text += f' = "{default}"' if isinstance(default, str) else f" = {default!r}"
    return text


def _type(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else str(inspect.formatannotation(annotation))
    return text.replace("'", '"') if "Literal" in text else text


def words(found: object) -> Iterator[str]:
    """A docstring in Markdown: its paragraphs, then arguments, result and errors as lists, then the example."""
    doc = inspect.getdoc(found) or ""
    prose, *rest = SECTION.split(doc)
    yield _markdown(prose)
    for kind, text in zip(rest[::2], rest[1::2], strict=True):
        text = textwrap.dedent(text.strip("\n"))
        if kind == "Example":
            yield f"```pycon\n{text.strip()}\n```"
        elif kind == "Returns":
            yield f"Returns: {_markdown(text)}"
        else:
            items = re.findall(r"^(\w+): (.*(?:\n +.*)*)", text, re.MULTILINE)
            lines = [f"- `{name}`: {_markdown(' '.join(said.split()))}" for name, said in items]
            heading = "Raises:\n\n" if kind == "Raises" else ""
            yield heading + "\n".join(lines)


def _markdown(text: str) -> str:
    """Prose of a docstring: double backticks are single ones here."""
    return re.sub(r"``([^`]+)``", r"`\1`", text.strip())
