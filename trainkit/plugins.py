"""Plugins: a file in a package of ours with a function ``build``, or ``package.module:function`` of the user's own.

The options of a plugin are the keyword-only parameters of its function. They are read from the source by `ast`, so that
a misspelt option or a value of the wrong type is refused at submission, in milliseconds, without importing torch.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin

from trainkit import fileio, importing
from trainkit.errors import UserError, did_you_mean

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "None": None}


def option_type(annotation: str) -> Any:
    """The type that an annotation in a plugin's source says; None for one whose values are not checked.

    Understands int, float, bool, str, None, Literal and unions of them.
    """
    if literal := re.fullmatch(r"Literal\[(.*)\]", annotation):
        return Literal[ast.literal_eval(f"({literal[1]},)")]
    parts = [part.strip() for part in annotation.split("|")]
    return Union[tuple(_TYPES[part] for part in parts)] if all(part in _TYPES for part in parts) else None  # noqa: UP007


def fill(build: Callable[..., Any], options: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """All keyword-only parameters of ``build`` with the values of ``options`` or their defaults.

    ``where`` is the configuration section, for messages.
    """
    filled = dict(options)
    for parameter in inspect.signature(build).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if parameter.name in options:
            annotation = parameter.annotation
            text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
            filled[parameter.name] = convert(options[parameter.name], text, key=f"{where}.{parameter.name}")
        elif parameter.default is not inspect.Parameter.empty:
            filled[parameter.name] = parameter.default
    return filled


def convert(value: Any, annotation: str, *, key: str) -> Any:
    """``value`` as ``annotation`` wants it, or a UserError that names ``key``."""
    kind = option_type(annotation)
    if kind is None:
        return value
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        if str(value) in choices:
            return value
        raise UserError(
            f"{key}={value} is not possible.",
            why=f"{key} is one of: {', '.join(choices)}.",
            fix=did_you_mean(str(value), choices, otherwise=f"Use {key}={choices[0]}."),
            key=key,
        )
    types = get_args(kind) or (kind,)
    # YAML has told 1, 1.0, true and text apart already. What is exact is accepted: 3 for a float, 3.0 for an int.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    for part in types:
        if (part is NoneType and value is None) or (part is bool and isinstance(value, bool)):
            return value
        if (part is int and is_number and value % 1 == 0) or (part is float and is_number):
            return part(value)
        if part is str and (is_number or isinstance(value, str)):
            return str(value)
    wanted = " or ".join(_WORDS[part] for part in types)
    shown = str(value).lower() if isinstance(value, bool) else "null" if value is None else value
    raise UserError(f"{key}={shown} is not possible.", why=f"{key} is {wanted}.", fix=f"Give {wanted}.", key=key)


# Python files of the user's own, read without running them: whether a job could import them, and who says no where.


def find_module(name: str) -> Path | None:
    """The file of a module. `find_spec` would import the packages that it is in."""
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    file = Path(spec.origin) if spec is not None and spec.origin is not None else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    for part in rest:
        inside = [folder / part for folder in folders]
        files = [file for item in inside for file in (item / "__init__.py", item.with_suffix(".py")) if file.is_file()]
        file, folders = (files[0] if files else None), [item for item in inside if item.is_dir()]
    return file


def is_of_python_itself(file: Path) -> bool:
    """Whether it is in the standard library: ``subprocess:run`` takes an argument as well, and is no data set."""
    library = Path(sysconfig.get_path("stdlib")).resolve()
    inside = file.resolve()
    return inside.is_relative_to(library) and not _is_installed(inside)


def check_module(module: str, file: Path, *, key: str | None, installed: bool = True) -> None:
    """Refuse a module of the user's own that Python cannot read, or that asks for a module or a name that is not there.

    Follows what it imports of the user's own, not of packages. Imports inside functions, ``try`` and
    ``if TYPE_CHECKING`` may fail.

    Args:
        key: the setting that names the module, for the message.
        installed: the job runs in this environment, so a package that is missing here is missing there.
    """
    seen = {file}
    waiting = [(module, file)]
    while waiting:
        name, path = waiting.pop()
        for line, wanted, names in _imports(
            parse(path, key).body, name if path.name == "__init__.py" else name.rpartition(".")[0]
        ):
            refuse_namesake(wanted, f"{path}:{line} imports '{wanted}'", key)
            found = _found(wanted)
            if found is None:
                changes_path = b"sys.path" in fileio.read_bytes(path, follow=True)
                if (installed and not changes_path) or Path(wanted.partition(".")[0]).is_dir():
                    raise UserError(
                        f"{path}:{line} imports '{wanted}', which is not there.",
                        why="No such module is installed in this environment or lies in the current folder.",
                        fix=f"Install it: {shlex.quote(sys.executable)} -m pip install PACKAGE; or correct the name.",
                        key=key,
                    )
                continue
            if not _is_own(found):
                continue
            for item in names:
                bound = names_of(found, key)
                if not {item, "*"} & bound and _found(f"{wanted}.{item}") is None:
                    raise UserError(
                        f"{path}:{line} imports '{item}' from '{wanted}', which does not have it.",
                        why=f"{found} defines no such name.",
                        fix=did_you_mean(item, sorted(bound), otherwise="Correct the name."),
                        key=key,
                    )
            if found not in seen:
                seen.add(found)
                waiting.append((wanted, found))


def refuse_namesake(module: str, what: str, key: str | None) -> None:
    """Refuse a module of the user's that is behind a package of ours of the same name."""
    if file := importing.namesake(module):
        name = Path(file).stem
        raise UserError(
            f"{what}, which would be trainkit's own package '{name}'.",
            why=f"{file} has the name of a package that every command and every rank imports first.",
            fix=f"Rename it, for example my_{name}, and what imports it.",
            key=key,
        )


def parse(file: Path, key: str | None) -> ast.Module:
    """A file's syntax tree. Raises UserError, with file and line, where it is no Python."""
    try:
        return _parsed(file)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise _no_python(file, error, key) from None


def import_error(error: BaseException, name: str, key: str | None) -> UserError:
    """An error that importing ``name`` has raised, as one for the user: file and line are theirs."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return _no_python(Path(error.filename), error, key)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".py")]
    own = [frame for frame in frames if _is_own(Path(frame.filename))]
    return UserError(
        f"{own[-1].filename}:{own[-1].lineno} could not be imported." if own else f"'{name}' could not be imported.",
        why=f"{type(error).__name__}: {error}.",
        fix="Correct that line, or install what it asks for into this environment.",
        key=key,
    )


def names_of(file: Path, key: str | None) -> set[str]:
    """Names that a module binds at its top level; ``*`` where only running it could tell."""
    found: set[str] = set()
    for node in _at_top(parse(file, key).body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("globals", "exec", "setattr"):
            found.add("*")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _no_python(file: Path, error: SyntaxError | ValueError, key: str | None) -> UserError:
    line = getattr(error, "lineno", None)
    return UserError(
        f"{file}{f':{line}' if line else ''} is not valid Python.",
        why=f"{getattr(error, 'msg', None) or error}: {(getattr(error, 'text', None) or '').strip()}".rstrip(": ")
        + ".",
        fix="Correct it, and submit again.",
        key=key,
    )


@cache
def _parsed(file: Path) -> ast.Module:
    content = fileio.read_bytes(file, follow=True)  # as bytes: the file itself may say its encoding
    return ast.parse(content, filename=str(file))


def _imports(body: list[ast.stmt], package: str) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and names of what is imported without an alternative; only names of modules that are its own."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package if node.level else ""
            wanted = ".".join(part for part in (base, node.module) if part)
            if wanted and (not node.level or base):
                yield node.lineno, wanted, [alias.name for alias in node.names if alias.name != "*"]


def _at_top(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All that runs when the module is imported; of functions and classes only themselves."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _found(module: str) -> Path | None:
    """Where a module is; of a package that is not the user's own only the package is looked for."""
    first = module.partition(".")[0]
    if first in sys.builtin_module_names or first in sys.stdlib_module_names:
        return Path(sysconfig.get_path("stdlib"), first)
    try:
        spec = importlib.util.find_spec(first)
        if spec is None:
            return None
        own = find_module(module)
    except (ImportError, ValueError, AttributeError):
        return None
    places = [Path(folder) for folder in spec.submodule_search_locations or []]
    if any(map(_is_installed, [*places, *([Path(spec.origin)] if spec.origin else [])])):
        return Path(spec.origin or (places[0] if places else first), "installed")
    if own is not None:
        return own
    inside = [folder.joinpath(*module.split(".")[1:]) for folder in places]
    return next((item for item in inside if item.is_dir() or any(item.parent.glob(f"{item.name}.*"))), None)


def _is_own(file: Path) -> bool:
    if file.suffix != ".py" or _is_installed(file) or is_of_python_itself(file):
        return False
    return not file.resolve().is_relative_to(Path(__file__).resolve().parent)


def _is_installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(file.parts))


# Package -> what its plugins are called in messages, and the setting that names one.
_KINDS: dict[str, tuple[str, str | None]] = {
    "strategies": ("strategy", "strategy.name"),
    "datasets": ("data set", "data.name"),
    "models": ("model", "model.name"),
    "tasks": ("task", "task.name"),
    "monitor": ("logger", "monitor.loggers"),
    "schedulers": ("scheduler", "launch.executor"),
    "optim": ("optimizer", "optim.name"),
    "schedule": ("schedule", "schedule.name"),
}


@dataclass(frozen=True)
class Signature:
    """What a plugin's function accepts as options."""

    options: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool  # it has **kwargs
    annotations: Mapping[str, str] = field(default_factory=dict)  # as written in the source
    defaults: Mapping[str, Any] = field(default_factory=dict)  # those that are literals
    doc: str = ""


def available(package: str) -> list[str]:
    """Names of the plugins in ``package``: its modules that define ``build`` at top level."""
    folder = _package_folder(package)
    return sorted(file.stem for file in folder.glob("*.py") if _find_function(file, "build") is not None)


def package_of(key: str) -> str:
    """The package whose plugins a setting names."""
    name = next(name for name, (_, setting) in _KINDS.items() if setting == key)
    return "trainkit.data.datasets" if name == "datasets" else f"trainkit.{name}"


def load(package: str, name: str) -> Callable[..., Any]:
    """Import the function of plugin ``name``: a file of ``package``, or ``some.module:function``."""
    if ":" not in name:
        require(package, name)
        return importlib.import_module(f"{package}.{name}").build  # type: ignore[no-any-return]
    _file_of(package, name)
    module_name, function = name.split(":", 1)
    try:
        found: Any = getattr(importlib.import_module(module_name), function, None)
    except (ImportError, SyntaxError) as error:
        raise import_error(error, module_name, _kind(package)[1]) from error
    # A module of the user's may hold `os.system` by another name: only what Python source defines is a plugin.
    if not (inspect.isclass(found) or (callable(found) and inspect.isfunction(inspect.unwrap(found)))):
        raise UserError(
            f"'{name}' names no function.",
            why=f"Module '{module_name}' has no function '{function}' written in Python.",
            fix=f"Define '{function}' in {module_name}.py, or correct the name.",
            key=_kind(package)[1],
        )
    return found  # type: ignore[no-any-return]


def signature(package: str, name: str) -> Signature:
    """The options of plugin ``name``, read without importing it."""
    node = _unwrapped(_file_of(package, name), name.partition(":")[2] or "build")
    if node is None:
        # It may be assigned or imported there; only importing could tell, so let the run decide.
        return Signature((), (), takes_any=True)
    return _signature_of(node, zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))


def class_signature(file: Path, name: str) -> Signature:
    """What a class of a library takes beyond its first argument, all of it by name."""
    classes = [node for node in parse(file, None).body if isinstance(node, ast.ClassDef) and node.name == name]
    made = [node for item in classes for node in item.body if isinstance(node, ast.FunctionDef)]
    node = next((node for node in made if node.name == "__init__"), None)
    if node is None:
        return Signature((), (), takes_any=True)
    positional = node.args.args
    defaults = [*[None] * (len(positional) - len(node.args.defaults)), *node.args.defaults]
    named = [*zip(positional, defaults, strict=True)][2:]  # without self and the parameters
    return _signature_of(node, [*named, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)])


def _signature_of(node: ast.FunctionDef, options: Iterable[tuple[ast.arg, ast.expr | None]]) -> Signature:
    options = list(options)
    annotations = {arg.arg: ast.unparse(arg.annotation) for arg, _ in options if arg.annotation is not None}
    annotations = {name: re.sub(r"Optional\[(\w+)\]", r"\1 | None", text) for name, text in annotations.items()}
    defaults: dict[str, Any] = {}
    for arg, default in options:
        if default is not None:
            with contextlib.suppress(ValueError, TypeError):
                defaults[arg.arg] = ast.literal_eval(default)
    required = tuple(arg.arg for arg, default in options if default is None)
    names = tuple(arg.arg for arg, _ in options)
    any_more = node.args.kwarg is not None
    return Signature(names, required, any_more, annotations, defaults, ast.get_docstring(node) or "")


def stated(package: str, name: str) -> dict[str, Any]:
    """What the file of plugin ``name`` says of it: its upper-case constants at top level, as in ``RANKS = "one"``.

    Read without importing it, for those who must know this and never load it. What is no literal is left out.
    """
    return dict(_constants(_file_of(package, name)))


def check_options(package: str, name: str, options: Mapping[str, Any], *, where: str) -> None:
    """Refuse options that plugin ``name`` does not have, naming the nearest it has, and values of the wrong type.

    ``where`` is the configuration section, for the message: ``strategy``, ``data``, ``model``. A module of the user's
    own that is not valid Python is refused at its line.
    """
    check_against(signature(package, name), name, options, where=where)


def check_against(sig: Signature, name: str, options: Mapping[str, Any], *, where: str) -> None:
    """As `check_options`, by a signature."""
    for option, value in options.items():
        if option in sig.annotations:
            convert(value, sig.annotations[option], key=f"{where}.{option}")
        if option not in sig.options and not sig.takes_any:
            has = ", ".join(sig.options) or "no options"
            raise UserError(
                f"Unknown key '{where}.{option}'.",
                why=f"{where} '{name}' has: {has}.",
                fix=did_you_mean(
                    f"{where}.{option}",
                    [f"{where}.{item}" for item in sig.options],
                    otherwise=f"Remove '{where}.{option}'.",
                ),
                key=f"{where}.{option}",
            )
    for option in sig.required:
        if option not in options:
            raise UserError(
                f"{where} '{name}' needs '{where}.{option}'.",
                why="It has no default.",
                fix=f"Add {where}.{option}=VALUE.",
                key=f"{where}.name",
            )


def check_importable(package: str, name: str, *, installed: bool) -> None:
    """Refuse a plugin of the user's own that a job could not import (`check_module`)."""
    module, colon, function = name.partition(":")
    if not colon:
        return
    file, key = _file_of(package, name), _kind(package)[1]
    check_module(module, file, key=key, installed=installed)
    if not {function, "*"} & names_of(file, key):
        own = Path.cwd() / f"{module.replace('.', '/')}.py"
        hidden = f" It comes before {own}: give yours another name." if own.is_file() and own != file else ""
        raise UserError(
            f"Module '{module}' has no '{function}'.",
            why=f"{file} defines no such function.{hidden}",
            fix=did_you_mean(function, sorted(names_of(file, key)), otherwise="Correct the name."),
            key=key,
        )


def require(package: str, name: str) -> None:
    """Refuse a name that no file of ``package`` has."""
    names = available(package)
    if name not in names:
        word, key = _kind(package)
        raise UserError(
            f"Unknown {word} '{name}'.",
            why=f"There are: {', '.join(names)}; or package.module:function of your own.",
            fix=did_you_mean(name, names, otherwise="Use one of them."),
            key=key,
        )


def search_snapshot(code: Path | None, *, own: bool) -> None:
    """Look for modules that a run's configuration names in its snapshot, as `require_own_code` has let it pass.

    Args:
        code: where its modules are; None: nothing of it is imported.
        own: the user's own come before the current folder, and behind installed libraries. Those of somebody else,
            whose code the user has allowed, come behind everything.
    """
    if code is not None:
        here = os.getcwd()
        others = [folder for folder in sys.path if folder not in (here, str(code))]
        sys.path[:] = [str(code), here, *others] if own else [here, *others, str(code)]
        importing.installed_first(str(code))
        importlib.invalidate_caches()


@cache
def _package_folder(package: str) -> Path:
    # Our own packages lie beside this file; asking the import system would import their parents.
    return Path(__file__).parent.joinpath(*package.split(".")[1:])


def _kind(package: str) -> tuple[str, str | None]:
    return _KINDS.get(package.rpartition(".")[2], ("plugin", None))


def _file_of(package: str, name: str) -> Path:
    """The source of a plugin. Raises UserError where there is none."""
    module, colon, _ = name.partition(":")
    key = _kind(package)[1]
    if not colon:
        require(package, name)
        return _package_folder(package) / f"{name}.py"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        origin = find_module(module)
    except (ImportError, ValueError):
        origin = None
    if origin is None:
        refuse_namesake(module, f"'{name}' is to be imported", key)
        raise UserError(
            f"No module '{module}' for '{name}'.",
            why="It is neither installed nor in the current folder.",
            fix=f"Start from the folder that holds {module.replace('.', '/')}.py, or install its package.",
            key=key,
        )
    if origin.suffix != ".py" or is_of_python_itself(origin):
        raise UserError(
            f"'{name}' is no plugin.",
            why=f"Module '{module}' is part of Python, or not written in it ({origin}).",
            fix="Name a function in a Python file of your own, or in an installed package.",
            key=key,
        )
    return origin


@cache
def _find_function(file: Path, name: str) -> ast.FunctionDef | None:
    if file.suffix != ".py" or not file.exists():
        return None
    ours = file.is_relative_to(Path(__file__).parent)
    if ours and f"def {name}(" not in fileio.read_text(file, follow=True):  # parsing a whole package would be slow
        return None
    for node in parse(file, None).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def _unwrapped(file: Path, name: str) -> ast.FunctionDef | None:
    """The function, or the one that it `functools.wraps`, whose parameters it then has: as for `inspect.signature`."""
    node = _find_function(file, name)
    for decorator in node.decorator_list if node is not None else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("wraps", "functools.wraps"):
            wrapped = ast.unparse(decorator.args[0])
            imported = [item for item in parse(file, None).body if isinstance(item, ast.ImportFrom)]
            for item, alias in [(one, name) for one in imported for name in one.names]:
                if wrapped == (alias.asname or alias.name):
                    origin = find_module(str(item.module))
                    return _unwrapped(origin, alias.name) if origin is not None else None
            return _unwrapped(file, wrapped)
    return node


@cache
def _constants(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in parse(file, None).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name.isupper() for alias in node.names):
            origin = find_module(str(node.module))  # what several plugins share
            is_plugins = origin is not None and origin.suffix == ".py" and not is_of_python_itself(origin)
            shared = _constants(origin) if origin is not None and is_plugins else {}
            named = {alias.asname or alias.name: alias.name for alias in node.names}
            found.update({own: shared[name] for own, name in named.items() if name in shared})
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(target, ast.Name)
            and target.id.isupper()
            and target.id[0] != "_"
        ):
            with contextlib.suppress(ValueError, TypeError):
                found[target.id] = ast.literal_eval(node.value) if node.value is not None else None
    return found


# The names of timm's and torchvision's models, read from their source.
#
# Importing timm costs seconds of CPU; `submit` has half of one. A model is registered by a decorator above its
# function, so that the files say what there is.

_TIMM_MODEL = re.compile(r"^@register_model\b[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)
_TIMM_RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)^\}\)", re.MULTILINE | re.DOTALL)
_TIMM_TAG = re.compile(r"""['"](\w+)\.(\w+)['"]\s*:""")
_TORCHVISION_MODEL = re.compile(r"^@register_model\(\)\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)


@lru_cache(maxsize=1)
def timm_models() -> dict[str, tuple[str, ...]]:
    """timm's models and the tags of their pretrained weights; empty where timm is not installed."""
    tags: dict[str, list[str]] = {}
    names: set[str] = set()
    for source in _sources("timm"):
        if "register_model" not in source:
            continue
        names.update(_TIMM_MODEL.findall(source))
        for renamed in _TIMM_RENAMED.findall(source):
            names.update(re.findall(r"'([^']+)':", renamed))
        for name, tag in _TIMM_TAG.findall(source):
            tags.setdefault(name, []).append(tag)
    return {name: tuple(tags.get(name, ())) for name in sorted(names)}


@lru_cache(maxsize=1)
def torchvision_models() -> tuple[str, ...]:
    """torchvision's classification models; empty where torchvision is not installed."""
    return tuple(sorted({name for source in _sources("torchvision") for name in _TORCHVISION_MODEL.findall(source)}))


def _sources(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)  # finds, does not import: the package is a top-level one
    for folder in (spec.submodule_search_locations or []) if spec else []:
        # Files of subfolders are detection, segmentation and video models, or helpers.
        for file in sorted(Path(folder, "models").glob("*.py")):
            yield fileio.read_text(file, follow=True)
