"""Plugins: a file in a package of ours with a function ``build``, or ``package.module:function`` of the user's own.

The options of a plugin are the keyword-only parameters of its function. They are read from the source by `ast`, so that
a misspelt option or a value of the wrong type is refused at submission, in milliseconds, without importing torch.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from trainkit import importing, reading, sources
from trainkit.errors import UserError, did_you_mean
from trainkit.options import convert


@dataclass(frozen=True)
class _Kind:
    """What a package's plugins are called in messages, and the setting that names one."""

    word: str
    key: str | None


_KINDS = {
    "strategies": _Kind("strategy", "strategy.name"),
    "data": _Kind("data set", "data.name"),
    "models": _Kind("model", "model.name"),
    "monitor": _Kind("logger", "monitor.loggers"),
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
        raise sources.import_error(error, module_name, _kind(package).key) from error
    # A module of the user's may hold `os.system` by another name: only what Python source defines is a plugin.
    if not (inspect.isclass(found) or (callable(found) and inspect.isfunction(inspect.unwrap(found)))):
        raise UserError(
            f"'{name}' names no function.",
            why=f"Module '{module_name}' has no function '{function}' written in Python.",
            fix=f"Define '{function}' in {module_name}.py, or correct the name.",
            key=_kind(package).key,
        )
    return found  # type: ignore[no-any-return]


def signature(package: str, name: str) -> Signature:
    """The options of plugin ``name``, read without importing it."""
    node = _unwrapped(_file_of(package, name), name.partition(":")[2] or "build")
    if node is None:
        # It may be assigned or imported there; only importing could tell, so let the run decide.
        return Signature((), (), takes_any=True)
    options = tuple(arg.arg for arg in node.args.kwonlyargs)
    required = tuple(
        arg.arg for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None
    )
    annotations = {arg.arg: ast.unparse(arg.annotation) for arg in node.args.kwonlyargs if arg.annotation is not None}
    defaults: dict[str, Any] = {}
    for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        with contextlib.suppress(ValueError, TypeError):
            defaults[arg.arg] = ast.literal_eval(default) if default is not None else ...
    given = {name: value for name, value in defaults.items() if value is not ...}
    return Signature(options, required, node.args.kwarg is not None, annotations, given, ast.get_docstring(node) or "")


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
    sig = signature(package, name)
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
    """Refuse a plugin of the user's own that a job could not import (`trainkit.sources.check_importable`)."""
    module, colon, function = name.partition(":")
    if not colon:
        return
    file, key = _file_of(package, name), _kind(package).key
    sources.check_importable(module, file, key=key, installed=installed)
    if not {function, "*"} & sources.names_of(file, key):
        own = Path.cwd() / f"{module.replace('.', '/')}.py"
        hidden = f" It comes before {own}: give yours another name." if own.is_file() and own != file else ""
        raise UserError(
            f"Module '{module}' has no '{function}'.",
            why=f"{file} defines no such function.{hidden}",
            fix=did_you_mean(function, sorted(sources.names_of(file, key)), otherwise="Correct the name."),
            key=key,
        )


def require(package: str, name: str) -> None:
    """Refuse a name that no file of ``package`` has."""
    names = available(package)
    if name not in names:
        kind = _kind(package)
        raise UserError(
            f"Unknown {kind.word} '{name}'.",
            why=f"There are: {', '.join(names)}; or package.module:function of your own.",
            fix=did_you_mean(name, names, otherwise="Use one of them."),
            key=kind.key,
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


def _kind(package: str) -> _Kind:
    return _KINDS.get(package.rpartition(".")[2], _Kind("plugin", None))


def _file_of(package: str, name: str) -> Path:
    """The source of a plugin. Raises UserError where there is none."""
    if ":" not in name:
        require(package, name)
        return _package_folder(package) / f"{name}.py"
    return _source_of_user_module(name, _kind(package).key)


def _source_of_user_module(name: str, key: str | None) -> Path:
    module_name = name.partition(":")[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        origin = sources.find_module(module_name)
    except (ImportError, ValueError):
        origin = None
    if origin is None:
        raise UserError(
            f"No module '{module_name}' for '{name}'.",
            why="It is neither installed nor in the current folder.",
            fix=f"Start from the folder that holds {module_name.replace('.', '/')}.py, or install its package.",
            key=key,
        )
    if origin.suffix != ".py" or sources.is_of_python_itself(origin):
        raise UserError(
            f"'{name}' is no plugin.",
            why=f"Module '{module_name}' is part of Python, or not written in it ({origin}).",
            fix="Name a function in a Python file of your own, or in an installed package.",
            key=key,
        )
    return origin


@cache
def _find_function(file: Path, name: str) -> ast.FunctionDef | None:
    if file.suffix != ".py" or not file.exists():
        return None
    ours = file.is_relative_to(Path(__file__).parent)
    if ours and f"def {name}(" not in reading.read_text(file, follow=True):  # parsing a whole package would be slow
        return None
    for node in sources.parse(file, None).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def _unwrapped(file: Path, name: str) -> ast.FunctionDef | None:
    """The function, or the one that it `functools.wraps`, whose parameters it then has: as for `inspect.signature`."""
    node = _find_function(file, name)
    for decorator in node.decorator_list if node is not None else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("wraps", "functools.wraps"):
            wrapped = ast.unparse(decorator.args[0])
            imported = [item for item in sources.parse(file, None).body if isinstance(item, ast.ImportFrom)]
            for item, alias in [(one, name) for one in imported for name in one.names]:
                if wrapped == (alias.asname or alias.name):
                    origin = sources.find_module(str(item.module))
                    return _unwrapped(origin, alias.name) if origin is not None else None
            return _unwrapped(file, wrapped)
    return node


@cache
def _constants(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in sources.parse(file, None).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name.isupper() for alias in node.names):
            origin = sources.find_module(str(node.module))  # what several plugins share
            is_plugins = origin is not None and origin.suffix == ".py" and not sources.is_of_python_itself(origin)
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
