"""Plugins: a file in a package of ours with a function ``build``, or ``package.module:function`` of the user's own.

The options of a plugin are the keyword-only parameters of its function. They are read from the source by `ast`, so that
a misspelt option or a value of the wrong type is refused at submission, in milliseconds, without importing torch. So
are the user's own modules: whether a job could import them, and which line says no.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from trainkit import fileio, importing
from trainkit.errors import UserError, did_you_mean, require_package, unknown

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "None": None}
_HERE = Path(__file__).resolve().parent
_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
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


# Options and their types


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
    keywords = {it.name: it for it in inspect.signature(build).parameters.values() if it.kind is it.KEYWORD_ONLY}
    filled = {name: it.default for name, it in keywords.items() if it.default is not it.empty} | dict(options)
    for name in [name for name in options if name in keywords]:
        annotation = keywords[name].annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        filled[name] = convert(options[name], text, key=f"{where}.{name}")
    return filled


def convert(value: Any, annotation: str, *, key: str) -> Any:
    """``value`` as ``annotation`` wants it, or a UserError that names ``key``."""
    from pydantic import TypeAdapter, ValidationError  # most commands do without

    if (kind := option_type(annotation)) is None:
        return value
    # YAML has told 1, 1.0, true and text apart already. What is exact is accepted: 3 for a float, 3.0 for an int.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    same = [value, *([int(value)] if is_number and value % 1 == 0 else []), *([str(value)] if is_number else [])]
    for candidate in same:
        with contextlib.suppress(ValidationError):
            return TypeAdapter(kind).validate_python(candidate, strict=True)
    choices = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
    words = choices[0] if choices else " or ".join(_WORDS[part] for part in get_args(kind) or (kind,))
    wanted = f"one of: {', '.join(choices)}" if choices else words
    shown = str(value).lower() if isinstance(value, bool) else "null" if value is None else value
    fix = did_you_mean(str(value), choices, otherwise=f"Give {words}.")
    raise UserError(f"{key}={shown} is not possible.", why=f"{key} is {wanted}.", fix=fix, key=key)


class Signature(NamedTuple):
    """What a plugin's function accepts as options."""

    options: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    takes_any: bool = True  # it has **kwargs
    annotations: Mapping[str, str] = {}  # as written in the source
    defaults: Mapping[str, Any] = {}  # those that are literals
    doc: str = ""


def signature(package: str, name: str) -> Signature:
    """The options of plugin ``name``, read without importing it."""
    return _signature_of(_unwrapped(_file_of(package, name), name.partition(":")[2] or "build"))


def class_signature(file: Path, name: str) -> Signature:
    """What a class of a library takes beyond its first argument, all of it by name."""
    classes = [node for node in parse(file, None).body if isinstance(node, ast.ClassDef) and node.name == name]
    methods = [node for item in classes for node in item.body if isinstance(node, ast.FunctionDef)]
    node = next((node for node in methods if node.name == "__init__"), None)
    return _signature_of(node, by_name=node.args.args[2:]) if node else Signature()  # without self and the parameters


def _signature_of(node: ast.FunctionDef | None, by_name: Sequence[ast.arg] = ()) -> Signature:
    """The options of a function. Of a name that may be assigned or imported only importing could tell: the run decides.

    Args:
        by_name: its positional parameters that are options as well.
    """
    if node is None:
        return Signature()
    of_the_last = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
    of_keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    defaults = {arg.arg: default for arg, default in (*of_the_last, *of_keywords) if default is not None}
    options = [*by_name, *node.args.kwonlyargs]
    written = {arg.arg: ast.unparse(arg.annotation) for arg in options if arg.annotation is not None}
    return Signature(
        options=tuple(arg.arg for arg in options),
        required=tuple(arg.arg for arg in options if arg.arg not in defaults),
        takes_any=node.args.kwarg is not None,
        annotations={name: re.sub(r"Optional\[(\w+)\]", r"\1 | None", text) for name, text in written.items()},
        defaults=_literals(defaults),
        doc=ast.get_docstring(node) or "",
    )


def _literals(values: Mapping[str, ast.expr]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        with contextlib.suppress(ValueError, TypeError):
            found[name] = ast.literal_eval(value)
    return found


def check_options(package: str, name: str, options: Mapping[str, Any], *, where: str) -> None:
    """Refuse options that plugin ``name`` does not have, naming the nearest it has, and values of the wrong type.

    ``where`` is the configuration section, for the message: ``strategy``, ``data``, ``model``. A module of the user's
    own that is not valid Python is refused at its line.
    """
    check_against(signature(package, name), name, options, where=where)


def check_against(sig: Signature, name: str, options: Mapping[str, Any], *, where: str) -> None:
    """As `check_options`, by a signature."""
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
            what, fix = f"{where} '{name}' needs '{where}.{option}'.", f"Add {where}.{option}=VALUE."
            raise UserError(what, why="It has no default.", fix=fix, key=f"{where}.name")


# Finding and loading plugins


def available(package: str) -> list[str]:
    """Names of the plugins in ``package``: its modules that define ``build`` at top level."""
    return sorted(file.stem for file in _folder(package).glob("*.py") if _function(file, "build") is not None)


def package_of(key: str) -> str:
    """The package whose plugins a setting names."""
    name = next(name for name, (_, setting) in _KINDS.items() if setting == key)
    return "trainkit.data.datasets" if name == "datasets" else f"trainkit.{name}"


def require(package: str, name: str) -> None:
    """Refuse a name that no file of ``package`` has."""
    word, key = _kind(package)
    if name not in (names := available(package)):
        raise unknown(word, name, names, own=True, key=key)


def load(package: str, name: str) -> Callable[..., Any]:
    """Import the function of plugin ``name``: a file of ``package``, or ``some.module:function``."""
    _file_of(package, name)
    module, colon, function = name.partition(":")
    if not colon:
        return importlib.import_module(f"{package}.{name}").build  # type: ignore[no-any-return]
    key = _kind(package)[1]
    try:
        found: Any = getattr(importlib.import_module(module), function, None)
    except (ImportError, SyntaxError) as error:
        raise _import_error(error, module, key) from error
    # A module of the user's may hold `os.system` by another name: only what Python source defines is a plugin.
    if not (inspect.isclass(found) or (callable(found) and inspect.isfunction(inspect.unwrap(found)))):
        why = f"Module '{module}' has no function '{function}' written in Python."
        fix = f"Define '{function}' in {module}.py, or correct the name."
        raise UserError(f"'{name}' names no function.", why=why, fix=fix, key=key)
    return found  # type: ignore[no-any-return]


def stated(package: str, name: str) -> dict[str, Any]:
    """What the file of plugin ``name`` says of it: its upper-case constants at top level, as in ``RANKS = "one"``.

    Read without importing it, for those who must know this and never load it. What is no literal is left out.
    """
    return dict(_constants(_file_of(package, name)))


def require_extra(package: str, name: str) -> None:
    """Refuse a plugin of ours that states ``EXTRA = "mlflow"`` where that package is not installed."""
    extra = None if ":" in name else stated(package, name).get("EXTRA")
    if extra is not None:
        kind, key = _kind(package)
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
        importing.installed_first(str(code))
        importlib.invalidate_caches()


def _folder(package: str) -> Path:
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
        return _folder(package) / f"{name}.py"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    origin = None
    with contextlib.suppress(ImportError, ValueError):
        origin = find_module(module)
    if origin is None:
        _refuse_namesake(module, f"'{name}' is to be imported", key)
        fix = f"Start from the folder that holds {module.replace('.', '/')}.py, or install its package."
        why = "It is neither installed nor in the current folder."
        raise UserError(f"No module '{module}' for '{name}'.", why=why, fix=fix, key=key)
    if origin.suffix != ".py" or _is_of_python_itself(origin):
        why = f"Module '{module}' is part of Python, or not written in it ({origin})."
        fix = "Name a function in a Python file of your own, or in an installed package."
        raise UserError(f"'{name}' is no plugin.", why=why, fix=fix, key=key)
    return origin


@cache
def _function(file: Path, name: str) -> ast.FunctionDef | None:
    if file.suffix != ".py" or not file.exists():
        return None
    ours = file.is_relative_to(Path(__file__).parent)
    if ours and f"def {name}(" not in fileio.read_text(file, follow=True):  # parsing a whole package would be slow
        return None
    functions = (node for node in parse(file, None).body if isinstance(node, ast.FunctionDef))
    return next((node for node in functions if node.name == name), None)


def _unwrapped(file: Path, name: str) -> ast.FunctionDef | None:
    """The function, or the one that it `functools.wraps`, whose parameters it then has: as for `inspect.signature`."""
    node = _function(file, name)
    for decorator in node.decorator_list if node is not None else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("wraps", "functools.wraps"):
            wrapped = ast.unparse(decorator.args[0])
            for item in (item for item in parse(file, None).body if isinstance(item, ast.ImportFrom)):
                for alias in item.names:
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
            shared = (
                _constants(origin) if origin and origin.suffix == ".py" and not _is_of_python_itself(origin) else {}
            )
            found |= {item.asname or item.name: shared[item.name] for item in node.names if item.name in shared}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        target, value = targets[0], getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and value is not None:
            found |= _literals({target.id: value}) if target.id.isupper() and target.id[0] != "_" else {}
    return found


# Modules of the user's own


def find_module(name: str) -> Path | None:
    """The file of a module. `find_spec` would import the packages that it is in."""
    first, *rest = name.split(".")
    spec = None if name == "__main__" else importlib.util.find_spec(first)  # which has none, and says so by an error
    file = Path(spec.origin) if spec is not None and spec.origin is not None else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    for part in rest:
        inside = [folder / part for folder in folders]
        files = [file for item in inside for file in (item / "__init__.py", item.with_suffix(".py")) if file.is_file()]
        file, folders = (files[0] if files else None), [item for item in inside if item.is_dir()]
    return file


def check_importable(package: str, name: str, *, installed: bool) -> None:
    """Refuse a plugin of the user's own whose module Python cannot read, or that imports what is not there, or that
    has no such function.

    Follows what it imports of the user's own. Imports inside functions, ``try`` and ``if TYPE_CHECKING`` may fail.

    Args:
        installed: the job runs in this environment, so a package that is missing here is missing there.
    """
    module, colon, function = name.partition(":")
    if not colon:
        return
    file, key = _file_of(package, name), _kind(package)[1]
    _check_imports(module, file, key, installed, set())
    if not _may_define(file, function):
        what, why = f"Module '{module}' has no '{function}'.", f"{file} defines no such function."
        raise UserError(what, why=why, fix=_name_instead(file, function), key=key)


def _check_imports(module: str, file: Path, key: str | None, installed: bool, seen: set[Path]) -> None:
    seen.add(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    changes_path = b"sys.path" in fileio.read_bytes(file, follow=True)
    for line, wanted, names in _imports(parse(file, key).body, package):
        _refuse_namesake(wanted, f"{file}:{line} imports '{wanted}'", key)
        if not _is_there(wanted):
            # An environment of the job's own may have other packages, but not more modules of the user's.
            if (installed and not changes_path) or Path(wanted.partition(".")[0]).is_dir():
                why = "No such module is installed in this environment or lies in the current folder."
                fix = f"Install it: {shlex.quote(sys.executable)} -m pip install PACKAGE; or correct the name."
                raise UserError(f"{file}:{line} imports '{wanted}', which is not there.", why=why, fix=fix, key=key)
            continue
        if (found := find_module(wanted)) is not None and not _is_own(found):
            continue
        for item in names:
            if found is not None and not _may_define(found, item) and not _is_there(f"{wanted}.{item}"):
                what = f"{file}:{line} imports '{item}' from '{wanted}', which does not have it."
                raise UserError(what, why=f"{found} defines no such name.", fix=_name_instead(found, item), key=key)
        for part in (wanted, *(f"{wanted}.{item}" for item in names)):
            if (own := find_module(part)) is not None and _is_own(own) and own not in seen:
                _check_imports(part, own, key, installed, seen)


def _imports(body: list[ast.stmt], package: str) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and names of what is imported without an alternative."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # a relative import outside of a package
                wanted = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield node.lineno, wanted, [alias.name for alias in node.names if alias.name != "*"]


def _is_there(module: str) -> bool:
    """Whether a module can be found; of an installed package only the package is looked for."""
    first, *rest = module.split(".")
    if first in (*sys.stdlib_module_names, "__main__"):
        return True
    spec = importlib.util.find_spec(first)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    if spec is None or not rest or any(map(_is_installed, folders)):
        return spec is not None
    inside = [folder.joinpath(*rest) for folder in folders]
    return any(item.is_dir() or any(item.parent.glob(f"{item.name}.*")) for item in inside)


def _may_define(file: Path, name: str) -> bool:
    """Whether a file's text has that name. It may be assigned or imported; only running the file could tell."""
    may_be = rf"\b{re.escape(name)}\b|import \*|globals|exec|setattr|__getattr__"
    return re.search(may_be.encode(), fileio.read_bytes(file, follow=True)) is not None


def _name_instead(file: Path, name: str) -> str:
    names = [node.name for node in parse(file, None).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return did_you_mean(name, names, otherwise="Correct the name.")


@cache
def parse(file: Path, key: str | None) -> ast.Module:
    """A file's syntax tree. Raises UserError, with file and line, where it is no Python."""
    content = fileio.read_bytes(file, follow=True)  # as bytes: the file itself may say its encoding
    try:
        return ast.parse(content, filename=str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise _no_python(file, error, key) from None


def _no_python(file: Path, error: SyntaxError | ValueError, key: str | None) -> UserError:
    line, message, text = (getattr(error, name, None) for name in ("lineno", "msg", "text"))
    why = f"{message or error}: {(text or '').strip()}".rstrip(": ")
    what = f"{file}{f':{line}' if line else ''} is not valid Python."
    return UserError(what, why=f"{why}.", fix="Correct it, and submit again.", key=key)


def _import_error(error: BaseException, name: str, key: str | None) -> UserError:
    """An error that importing ``name`` has raised, as one for the user: file and line are theirs."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return _no_python(Path(error.filename), error, key)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(Path(frame.filename))]
    what = f"{own[-1].filename}:{own[-1].lineno} could not be imported." if own else f"'{name}' could not be imported."
    fix = "Correct that line, or install what it asks for into this environment."
    return UserError(what, why=f"{type(error).__name__}: {error}.", fix=fix, key=key)


def _refuse_namesake(module: str, what: str, key: str | None) -> None:
    """Refuse a module of the user's that is behind a package of ours of the same name."""
    if file := importing.namesake(module):
        name = Path(file).stem
        what += f", which would be trainkit's own package '{name}'."
        why = f"{file} has the name of a package that every command and every rank imports first."
        raise UserError(what, why=why, fix=f"Rename it, for example my_{name}, and what imports it.", key=key)


def _is_own(file: Path) -> bool:
    if file.suffix != ".py" or _is_installed(file) or _is_of_python_itself(file):
        return False
    return not file.resolve().is_relative_to(_HERE)


def _is_installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(file.parts))


def _is_of_python_itself(file: Path) -> bool:
    """Whether it is in the standard library: ``subprocess:run`` takes an argument as well, and is no data set."""
    inside = file.resolve()
    return inside.is_relative_to(_LIBRARY) and not _is_installed(inside)


# The names of timm's and torchvision's models, read from their source.
#
# Importing timm costs seconds of CPU; `submit` has half of one. A model is registered by a decorator above its
# function, so that the files say what there is.

_TIMM_MODEL = re.compile(r"^@register_model\b[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)
_TIMM_RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)^\}\)", re.MULTILINE | re.DOTALL)
_TIMM_TAG = re.compile(r"""['"](\w+)\.(\w+)['"]\s*:""")
_TORCHVISION_MODEL = re.compile(r"^@register_model\(\)\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)


@cache
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


@cache
def torchvision_models() -> tuple[str, ...]:
    """torchvision's classification models; empty where torchvision is not installed."""
    return tuple(sorted({name for source in _sources("torchvision") for name in _TORCHVISION_MODEL.findall(source)}))


def _sources(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)  # finds, does not import: the package is a top-level one
    for folder in (spec.submodule_search_locations or []) if spec else []:
        # Files of subfolders are detection, segmentation and video models, or helpers.
        for file in sorted(Path(folder, "models").glob("*.py")):
            yield fileio.read_text(file, follow=True)
