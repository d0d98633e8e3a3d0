"""Plugins: a file in a package of ours with a function ``build``, or ``package.module:function`` of the user's own.

The options of a plugin are the keyword-only parameters of its function, and the fields of those that are a dataclass.
They are read from the source by `ast`, so that a misspelt option or a value of the wrong type is refused at submission,
in milliseconds, without importing torch.
"""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from trainkit.common import fileio, imports
from trainkit.common.errors import UserError, require_package, unknown
from trainkit.config.plugin_options import Signature, add_literal, by_options, check_against, signature_of

# Package -> what its plugins are called in messages, and the setting that names one.
_KINDS: dict[str, tuple[str, str | None]] = {
    "strategies": ("strategy", "strategy.name"),
    "datasets": ("data set", "data.name"),
    "models": ("model", "model.name"),
    "tasks": ("task", "task.name"),
    "monitor": ("logger", "monitor.loggers"),
    "cluster": ("scheduler", "launch.executor"),
    "optim": ("optimizer", "optim.name"),
    "schedule": ("schedule", "schedule.name"),
}

# Those that lie in another room.
_PACKAGES = {
    "datasets": "trainkit.data.datasets",
    "strategies": "trainkit.distributed.strategies",
    "tasks": "trainkit.training.tasks",
}


def signature(package: str, name: str) -> Signature:
    """The options of plugin ``name``, read without importing it."""
    return _signature(file_of(package, name), name.partition(":")[2] or "build")


def check_options(package: str, name: str, options: Mapping[str, Any], *, where: str) -> None:
    """Refuse options that plugin ``name`` does not have, naming the nearest it has, and values of the wrong type.

    ``where`` is the configuration section, for the message: ``strategy``, ``data``, ``model``. A module of the user's
    own that is not valid Python is refused at its line.
    """
    check_against(signature(package, name), name, options, where=where)


def available(package: str) -> list[str]:
    """Names of the plugins in ``package``: its modules that define ``build`` at top level."""
    return sorted(file.stem for file in _folder(package).glob("*.py") if _function(file, "build") is not None)


def package_of(key: str) -> str:
    """The package whose plugins a setting names."""
    settings = [setting for _, setting in _KINDS.values()]
    name = list(_KINDS)[settings.index(key)]
    return _PACKAGES.get(name, f"trainkit.{name}")


def require(package: str, name: str) -> None:
    """Refuse a name that no file of ``package`` has."""
    if not name.isidentifier() or _function(_folder(package) / f"{name}.py", "build") is None:
        word, key = kind_of(package)
        raise unknown(word, name, available(package), own=True, key=key)


def load(package: str, name: str) -> Callable[..., Any]:
    """Import the function of plugin ``name``: a file of ``package``, or ``some.module:function``.

    Fields of its dataclasses are keywords of its own.
    """
    file_of(package, name)
    module, colon, function = name.partition(":")
    if not colon:
        return by_options(importlib.import_module(f"{package}.{name}").build)
    key = kind_of(package)[1]
    try:
        found: Any = getattr(importlib.import_module(module), function, None)
    except (ImportError, SyntaxError) as error:
        raise _import_error(error, module, key) from error
    # A module of the user's may hold `os.system` by another name: only what Python source defines is a plugin.
    if not (inspect.isclass(found) or (callable(found) and inspect.isfunction(inspect.unwrap(found)))):
        why = f"Module '{module}' has no function '{function}' written in Python."
        fix = f"Define '{function}' in {module}.py, or correct the name. Then submit again."
        raise UserError(f"'{name}' does not name a function.", why=why, fix=fix, key=key)
    return by_options(found)


def stated(package: str, name: str) -> dict[str, Any]:
    """Return the upper-case constants at the top level of plugin ``name``'s file, as in ``RANKS = "one"``.

    Read without importing it, for those who must know this and never load it. What is no literal is left out.
    """
    return dict(_constants(file_of(package, name)))


def require_extra(package: str, name: str) -> None:
    """Refuse a plugin of ours that states ``EXTRA = "mlflow"`` where that package is not installed."""
    extra = None if ":" in name else stated(package, name).get("EXTRA")
    if extra is not None:
        kind, key = kind_of(package)
        require_package(extra, f"The {kind} {name} needs {extra}.", extra=extra, key=key)


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
        imports.installed_first(str(code))
        importlib.invalidate_caches()


def _folder(package: str) -> Path:
    # Our own packages lie beside this file; asking the import system would import their parents.
    return PACKAGE.joinpath(*package.split(".")[1:])


def kind_of(package: str) -> tuple[str, str | None]:
    return _KINDS.get(package.rpartition(".")[2], ("plugin", None))


def file_of(package: str, name: str) -> Path:
    """The source of a plugin. Raises UserError where there is none."""
    module, colon, _ = name.partition(":")
    key = kind_of(package)[1]
    if not colon:
        require(package, name)
        return _folder(package) / f"{name}.py"
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    origin = None
    with contextlib.suppress(ImportError, ValueError):
        origin = find_module(module)
    if origin is None:
        refuse_namesake(module, f"'{name}' is to be imported", key)
        fix = f"Start from the folder that holds {module.replace('.', '/')}.py, or install its package."
        why = "It is neither installed nor in the current folder."
        raise UserError(f"No module '{module}' for '{name}'.", why=why, fix=fix, key=key)
    if origin.suffix != ".py" or is_of_python_itself(origin):
        why = f"Module '{module}' is part of Python, or not written in Python ({origin})."
        fix = "Name a function in a Python file of your own, or in an installed package."
        raise UserError(f"'{name}' is not a plugin.", why=why, fix=fix, key=key)
    return origin


@cache
def _function(file: Path, name: str) -> ast.FunctionDef | None:
    if file.suffix != ".py" or not file.exists():
        return None
    ours = file.is_relative_to(PACKAGE)
    if ours and f"def {name}(" not in fileio.read_text(file, follow=True):  # parsing a whole package would be slow
        return None
    for node in parse(file, None).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def parameters(package: str, name: str) -> tuple[int, ast.arguments] | None:
    """Return a plugin function's line and its parameters, those of a class without ``self``.

    None where only importing could tell: a function that is decorated or assigned, a class that has no ``__init__``.
    """
    file = file_of(package, name)
    function = name.partition(":")[2] or "build"
    node = None
    for item in parse(file, None).body:
        if getattr(item, "name", None) == function:
            node = item  # a later definition replaces those before
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        return node.lineno, node.args
    if isinstance(node, ast.ClassDef) and not node.decorator_list:
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                with_self = "posonlyargs" if method.args.posonlyargs else "args"
                fields = dict(ast.iter_fields(method.args))
                fields[with_self] = fields[with_self][1:]
                return method.lineno, ast.arguments(**fields)
    return None


@cache
def _signature(file: Path, name: str) -> Signature:
    """The options of a function, or of the one that it `functools.wraps`: as for `inspect.signature`."""
    node = _function(file, name)
    if node is None:
        return Signature()
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("wraps", "functools.wraps"):
            home = _home(file, ast.unparse(decorator.args[0]))
            return _signature(*home) if home is not None else Signature()
    return signature_of(node, lambda annotation: _fields(file, annotation))


def _home(file: Path, name: str) -> tuple[Path, str] | None:
    """The file that defines a name of ``file``, and the name there: this file, or the one that it is imported from."""
    for node in parse(file, None).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if name == (alias.asname or alias.name):
                origin = find_module(str(node.module))
                return (origin, alias.name) if origin is not None and origin.suffix == ".py" else None
    return file, name


def _fields(file: Path, name: str) -> list[ast.stmt]:
    """Statements of a dataclass, those of its bases first; none for a name of ``file`` that is no dataclass."""
    home = _home(file, name)
    if home is None:
        return []
    file, name = home
    found: list[ast.stmt] = []
    for node in parse(file, None).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                return []
            for base in node.bases:
                found += _fields(file, ast.unparse(base))
            found += node.body
    return found


@cache
def _constants(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in parse(file, None).body:
        if isinstance(node, ast.ImportFrom):  # what several plugins share
            for alias in node.names:
                origin = find_module(str(node.module)) if alias.name.isupper() else None
                if origin is None or origin.suffix != ".py" or is_of_python_itself(origin):
                    continue
                if alias.name in _constants(origin):
                    found[alias.asname or alias.name] = _constants(origin)[alias.name]
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        else:
            continue
        if isinstance(target, ast.Name) and target.id.isupper() and target.id[0] != "_" and node.value is not None:
            add_literal(found, target.id, node.value)
    return found


def _import_error(error: BaseException, name: str, key: str | None) -> UserError:
    """An error that importing ``name`` has raised, as one for the user: file and line are theirs."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return no_python(Path(error.filename), error, key)
    what = f"'{name}' could not be imported."
    for frame in traceback.extract_tb(error.__traceback__):
        if is_own(Path(frame.filename)):
            what = f"{frame.filename}:{frame.lineno} could not be imported."
    fix = "Correct that line, or install what it imports in this environment."
    return UserError(what, why=f"{type(error).__name__}: {error}.", fix=fix, key=key)


def refuse_namesake(module: str, what: str, key: str | None) -> None:
    """Refuse a module of the user's that is behind a package of ours of the same name."""
    file = imports.namesake(module)
    if file:
        name = Path(file).stem
        what += f", which would be trainkit's own package '{name}'."
        why = f"{file} has the name of a package that every command and rank imports."
        raise UserError(what, why=why, fix=f"Rename it, for example my_{name}, and change the imports of it.", key=key)


PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()


def find_module(name: str) -> Path | None:
    """The file of a module. `find_spec` would import the packages that it is in."""
    first, *rest = name.split(".")
    if name == "__main__":  # which has no spec, and says so by an error
        return None
    spec = importlib.util.find_spec(first)
    if spec is None:
        return None
    file = Path(spec.origin) if spec.origin is not None else None
    folders = list(map(Path, spec.submodule_search_locations or []))
    for part in rest:
        inside = [folder / part for folder in folders]
        files = list[Path]()
        for item in inside:
            files += (item / "__init__.py", item.with_suffix(".py"))
        file = next(filter(Path.is_file, files), None)
        folders = list(filter(Path.is_dir, inside))
    return file


def may_define(file: Path, name: str) -> bool:
    """True if a file's text has that name. It may be assigned or imported; only running the file could tell."""
    may_be = rf"\b{re.escape(name)}\b|import \*|globals|exec|setattr|__getattr__"
    return re.search(may_be.encode(), fileio.read_bytes(file, follow=True)) is not None


@cache
def parse(file: Path, key: str | None) -> ast.Module:
    """A file's syntax tree. Raises UserError, with file and line, where it is no Python."""
    content = fileio.read_bytes(file, follow=True)  # as bytes: the file itself may say its encoding
    try:
        return ast.parse(content, filename=str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise no_python(file, error, key) from None


def no_python(file: Path, error: SyntaxError | ValueError, key: str | None) -> UserError:
    why = str(error)
    what = f"{file} is not valid Python."
    if isinstance(error, SyntaxError):
        why = f"{error.msg}: {(error.text or '').strip()}".rstrip(": ")
        what = f"{file}:{error.lineno} is not valid Python."
    return UserError(what, why=f"{why}.", fix="Correct it, and submit again.", key=key)


def is_own(file: Path) -> bool:
    if file.suffix != ".py" or is_installed(file) or is_of_python_itself(file):
        return False
    return not file.resolve().is_relative_to(PACKAGE)


def is_installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(file.parts))


def is_of_python_itself(file: Path) -> bool:
    """True if it is in the standard library: ``subprocess:run`` takes an argument as well, and is no data set."""
    inside = file.resolve()
    return inside.is_relative_to(_LIBRARY) and not is_installed(inside)
