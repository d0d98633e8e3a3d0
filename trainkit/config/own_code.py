"""Code of the user's own, read from its source: would a job find all that it imports, and could it call it?"""

import ast
import contextlib
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from trainkit.common import fileio
from trainkit.common.errors import UserError, did_you_mean
from trainkit.config import plugins
from trainkit.config.schema import Config
from trainkit.config.task_metrics import taken_of_train

_CALLS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "data": ("data.name", ("root",), 1),
    "models": ("model.name", ("info",), 1),
    "tasks": ("task.name", ("splits",), 1),
    "strategies": ("strategy.name", ("dist", "precision"), 0),
    "optim": ("optim.name", ("groups",), 1),
    "schedule": ("schedule.name", ("step", "total_steps", "lr"), 3),
    "monitor": ("monitor.loggers", ("run_dir", "config", "start"), 3),
    "schedulers": ("launch.executor", (), 0),
}
"""Kind -> the setting that names one, what it is given by position, and how many of these it has to take."""
_BY_NAME = {"optim": ("lr",)}
"""Kind -> what it is given by name and has to take."""


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
    file = plugins.file_of(package, name)
    key = plugins.kind_of(package)[1]
    _check_imports(module, file, key, installed, set())
    if not plugins.may_define(file, function):
        what = f"Module '{module}' has no '{function}'."
        why = f"{file} defines no such function."
        raise UserError(what, why=why, fix=_name_instead(file, function), key=key)


def check_script(file: Path, module: str, key: str, *, folder: Path, installed: bool) -> None:
    """Refuse a script that Python cannot read, or that imports what is not there.

    Args:
        module: its name, by which relative imports are resolved; ``__main__`` of a file.
        folder: where its own modules are looked for first.
        installed: as for `check_importable`.

    Raises:
        UserError: names the line.
    """
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        _check_imports(module, file, key, installed, set())
    finally:
        sys.path[:] = before


def _check_imports(module: str, file: Path, key: str | None, installed: bool, seen: set[Path]) -> None:
    seen.add(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    changes_path = b"sys.path" in fileio.read_bytes(file, follow=True)
    for line, wanted, names in _imports(plugins.parse(file, key).body, package):
        plugins.refuse_namesake(wanted, f"{file}:{line} imports '{wanted}'", key)
        if not _is_there(wanted):
            # An environment of the job's own may have other packages, but not more modules of the user's.
            if (installed and not changes_path) or Path(wanted.partition(".")[0]).is_dir():
                why = "The module is neither installed in this environment nor in the current folder."
                fix = f"Install it: {shlex.quote(sys.executable)} -m pip install PACKAGE; or correct the name."
                raise UserError(f"{file}:{line} imports '{wanted}', which is not there.", why=why, fix=fix, key=key)
            continue
        found = plugins.find_module(wanted)
        if found is not None and not plugins.is_own(found):
            continue
        for item in names:
            if found is not None and not plugins.may_define(found, item) and not _is_there(f"{wanted}.{item}"):
                what = f"{file}:{line} imports '{item}' from '{wanted}', which does not have it."
                raise UserError(what, why=f"{found} defines no such name.", fix=_name_instead(found, item), key=key)
        for name in ("", *names):
            part = f"{wanted}.{name}".rstrip(".")
            own = plugins.find_module(part)
            if own is not None and plugins.is_own(own) and own not in seen:
                _check_imports(part, own, key, installed, seen)


def _imports(body: list[ast.stmt], package: str) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and names of what is imported without an alternative."""
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # a relative import outside of a package
                wanted = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield node.lineno, wanted, [alias.name for alias in node.names if alias.name != "*"]


def _is_there(module: str) -> bool:
    """True if a module can be found; of an installed package only the package is looked for."""
    first, *rest = module.split(".")
    if first in (*sys.stdlib_module_names, "__main__"):
        return True
    spec = importlib.util.find_spec(first)
    if spec is None:
        return False
    folders = list(map(Path, spec.submodule_search_locations or []))
    if not rest or any(map(plugins.is_installed, folders)):
        return True
    for folder in folders:
        item = folder.joinpath(*rest)
        if item.is_dir() or any(item.parent.glob(f"{item.name}.*")):
            return True
    return False


def _name_instead(file: Path, name: str) -> str:
    names = [node.name for node in plugins.parse(file, None).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return did_you_mean(name, names, otherwise="Correct the name.")


def check_call(kind: str, name: str, config: Config) -> None:
    """Refuse ``package.module:function`` of the user's own that the job could not call.

    What only importing could tell (a decorator, a name that is assigned) is left to the job.

    Raises UserError that says how it is called.
    """
    found = plugins.parameters(f"trainkit.{kind}", name) if ":" in name else None
    if found is None:
        return
    line, takes = found
    key, given, fewest = _CALLS[kind]
    section = getattr(config, key.partition(".")[0])
    by_name = set(getattr(section, "options", {}))
    if kind == "optim":
        by_name |= {"lr", *config.optim.given()}
    if kind == "tasks":
        by_name |= taken_of_train(config).keys()
    misfit = _misfit(takes, given, fewest, by_name, wanted=_BY_NAME.get(kind, ()))
    if misfit:
        function = name.partition(":")[2]
        named = _BY_NAME.get(kind, ())
        words = ", ".join([*given, *(f"{name}=..." for name in named)])
        what = f"{key}={name} cannot be called the way a job calls it: {function}({words})."
        why = f"Line {line} has {function}({ast.unparse(takes)}), which {misfit}."
        options = ", ".join([*given[:fewest], *named, "*", "OPTION=DEFAULT"])
        fix = f"Write {function}({options}): the arguments after * are the options of `{key.partition('.')[0]}`."
        raise UserError(what, why=why, fix=fix, key=key)


def _misfit(
    takes: ast.arguments, given: Sequence[str], fewest: int, by_name: Collection[str], *, wanted: Sequence[str]
) -> str:
    """Why a function with these parameters cannot be called; empty if it can.

    Args:
        given: by position, of which it must take ``fewest``.
        by_name: given by name, if it has them; those that are ``wanted`` it must have.
    """
    positional = [*takes.posonlyargs, *takes.args]
    if len(positional) < fewest and takes.vararg is None:
        return f"takes {len(positional)} by position but gets {fewest}"
    filled = positional[: len(given)]
    for name in wanted:
        others = [item.arg for item in (*takes.args, *takes.kwonlyargs) if item not in filled]
        if name not in others and takes.kwarg is None:
            return f"does not take {name} by name"
    required = positional[: len(positional) - len(takes.defaults)]
    for item in required:
        if item not in filled and (item.arg not in by_name or item in takes.posonlyargs):
            return f"requires {item.arg}, which is not passed"
    return ""
