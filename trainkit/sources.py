"""Python files of the user's own, read without running them: whether a job could import them, and who says no where."""

from __future__ import annotations

import ast
import importlib.util
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from trainkit import reading
from trainkit.errors import UserError, did_you_mean


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


def check_importable(module: str, file: Path, *, key: str | None, installed: bool = True) -> None:
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
        for line, wanted, names in _imports(parse(path, key).body, _package_of(name, path)):
            found = _found(wanted)
            if found is None:
                if (installed and b"sys.path" not in reading.read_bytes(path, follow=True)) or _is_own_package(wanted):
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
                if (
                    item not in (bound := names_of(found, key))
                    and "*" not in bound
                    and _found(f"{wanted}.{item}") is None
                ):
                    raise UserError(
                        f"{path}:{line} imports '{item}' from '{wanted}', which does not have it.",
                        why=f"{found} defines no such name.",
                        fix=did_you_mean(item, sorted(bound), otherwise="Correct the name."),
                        key=key,
                    )
            if found not in seen:
                seen.add(found)
                waiting.append((wanted, found))


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
    content = reading.read_bytes(file, follow=True)  # as bytes: the file itself may say its encoding
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


def _package_of(module: str, file: Path) -> str:
    return module if file.name == "__init__.py" else module.rpartition(".")[0]


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
    if not _is_own_place(spec.origin, places):
        return Path(spec.origin or (places[0] if places else first), "installed")
    if own is not None:
        return own
    inside = [folder.joinpath(*module.split(".")[1:]) for folder in places]
    return next((item for item in inside if item.is_dir() or any(item.parent.glob(f"{item.name}.*"))), None)


def _is_own_package(module: str) -> bool:
    first = module.partition(".")[0]
    return first in {path.name for path in Path.cwd().iterdir() if path.is_dir()}


def _is_own_place(origin: str | None, places: list[Path]) -> bool:
    return all(not _is_installed(path) for path in [*places, *([Path(origin)] if origin else [])])


def _is_own(file: Path) -> bool:
    if file.suffix != ".py" or _is_installed(file) or is_of_python_itself(file):
        return False
    return not file.resolve().is_relative_to(Path(__file__).resolve().parent)


def _is_installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(file.parts))
