"""The arrows of the house: who may import whom, who may do what, how long a file and a command may be, and names."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

from jobs.__main__ import verbs
from tests.shell import PROJECT, python
from trainkit.config import plugins
from trainkit.run import folder

RULES = yaml.safe_load((PROJECT / "tests/architecture.yaml").read_text("utf-8"))
FLOORS: list[list[str]] = RULES["floors"]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

# Packages with plugins: one must not know another.
PLUGINS = (
    "trainkit.distributed.strategies",
    "trainkit.data.datasets",
    "trainkit.models",
    "trainkit.training.tasks",
    "trainkit.monitor",
    "trainkit.cluster",
)

# What is no verb but shared by verbs. Beyond that one verb may stand on another that it continues:
SHARED = {
    "jobs",
    "jobs.cli",
    "jobs.flags",
    "jobs.output",
    "jobs.shapes",
    "jobs.measured_shapes",
    "jobs.login_node",
    "jobs.dry_run",
}
VERBS = {
    "jobs.resume": {"jobs.swarm"},  # a swarm that was started in a terminal goes on there
    "jobs.train": {"jobs.join"},
    "jobs.completion": {"jobs.__main__"},  # which lists the verbs
    "jobs.cluster": {"jobs.bench"},  # one of which is the check of training
    "jobs.swarm": {"jobs.join"},  # the same peer, of a swarm that someone else created
}

TORCH_ROOMS = {
    "trainkit.bench",
    "trainkit.checkpoint",
    "trainkit.data",
    "trainkit.distributed",
    "trainkit.inference",
    "trainkit.models",
    "trainkit.swarm",
    "trainkit.tasks",
    "trainkit.training",
}
# Nothing inside a job needs what puts jobs onto machines.
INSIDE_A_JOB = {*TORCH_ROOMS, "trainkit.monitor"}
HEAVY = {
    "torch", "torchvision", "timm", "wandb", "tensorboard", "hivemind", "matplotlib", "sklearn", "fsspec", "mlflow",
    "trackio",
}  # fmt: skip

READING_CALLS = re.compile(
    r"(json|yaml|numpy|np|torch|pickle|tomllib|csv|ast)\.(load|loads|load_all|safe_load|fromfile|memmap|genfromtxt|reader)"
    r"|gzip\.(decompress|open)|tarfile\.open|zipfile\.ZipFile|mmap\.mmap|urllib\.request\.urlopen|load_file|safe_open"
    r"|(?!fileio\.).*\.(read_text|read_bytes)"
)

STARTING_CALLS = re.compile(
    r"subprocess\.\w+|os\.(system|popen|fork|forkpty|(spawn|exec|posix_spawn)\w*)|pty\.(spawn|fork)"
    r"|asyncio\.(subprocess\.)?create_subprocess_\w+|(utils\.)?CommandFunction"
)

WRITING = {
    *("write_text", "write_bytes", "touch", "mkdir", "makedirs", "chmod", "symlink_to", "hardlink_to", "symlink"),
    *("os.link", "os.open", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "urlretrieve", "extractall"),
    *("copyfile", "copy2", "copytree", "shutil.copy", "shutil.move", "save_file", "SummaryWriter", "FileHandler"),
}

SLURMS_PROGRAMS = {"squeue", "sacct", "sacctmgr", "scontrol", "sinfo", "sbatch", "scancel", "srun", "sshare", "sstat"}

ERRORS = {"UserError", "RefusedError", "SchedulerError", "RunFailedError", "TrainkitError"}

LONGEST = 500
LONG = {
    "slurm/devcluster": "one file that can be copied to any machine",
    "configs/schema.json": "generated",
    "trainkit/config/schema.py": "every setting, with its documentation: 380 lines of code",
    "trainkit/diagnosis/causes.yaml": "data: one table, whose order matters",
}

# `logbook` is where the recipes put what is handed in.
TOP = {
    "configs", "docs", "findings", "jobs", "logbook", "slurm", "tests", "trainkit", "pyproject.toml",
    "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md",
}  # fmt: skip

LONGEST_NAME = 72


@dataclass(frozen=True)
class Import:
    """One imported module: where it stands, and whether it is loaded with its importer or only named in types."""

    importer: str
    module: str
    line: int
    at_top: bool
    types_only: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of ours."""
    files = [file for package in ("jobs", "trainkit") for file in (PROJECT / package).rglob("*.py")]
    return {".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(file.read_text("utf-8")) for name, file in modules().items()}


@cache
def nodes(name: str) -> list[ast.AST]:
    """All of a module."""
    return list(ast.walk(trees()[name]))


@cache
def written(node: ast.AST) -> str:
    """The node as code, such as ``os.environ.get``."""
    return ast.unparse(node)


@cache
def imports() -> tuple[Import, ...]:
    """Every import of every module, those inside functions included."""
    return tuple(found for name, tree in trees().items() for found in imports_of(name, tree))


def imports_of(importer: str, tree: ast.Module) -> Iterator[Import]:
    """The imports in one file."""

    def walk(node: ast.AST, at_top: bool, types_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                continue
            top = at_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            types = types_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in written(child.test))
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(importer, alias.name, child.lineno, at_top, types_only)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{importer}:{child.lineno}: imports are written in full"
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    module = whole if whole in modules() else str(child.module)
                    yield Import(importer, module, child.lineno, at_top, types_only)
            yield from walk(child, top, types)

    yield from walk(tree, True, False)


def room(module: str) -> str:
    """The room that a module of ours is in."""
    if module in HEIGHT:  # a protocol lies below the plugins that keep it
        return module
    first, *rest = module.split(".")
    return first if first == "jobs" or not rest else f"{first}.{rest[0]}"


def ours(module: str) -> bool:
    return module.split(".")[0] in ("jobs", "trainkit")


def listed(items: Iterable[object]) -> list[str]:
    return sorted({str(item) for item in items})


# Who may import whom


def goes_up(found: Import) -> bool:
    here, there = room(found.importer), room(found.module)
    if not ours(found.module) or found.module == "trainkit" or here == there:
        return False
    return HEIGHT[there] >= HEIGHT[here]


def goes_up_inside(found: Import) -> bool:
    """Whether it is an import of a later folder of the same room."""
    place = room(found.importer)
    folders = RULES["folders"].get(place)
    if folders is None or place != room(found.module):
        return False
    here, there = (name.removeprefix(f"{place}.").split(".")[0] for name in (found.importer, found.module))
    return there in folders and (here not in folders or folders.index(there) > folders.index(here))


@cache
def members(package: str) -> set[str]:
    found = {f"{package}.{name}" for name in plugins.available(package)}
    assert found
    return found


def names_a_plugin(found: Import) -> bool:
    """To add a plugin is to add a file: nobody else names it, other plugins least of all."""
    return any(found.module in members(package) and found.importer != found.module for package in PLUGINS)


def stands_on_a_verb(found: Import) -> bool:
    inside = room(found.importer) == room(found.module) == "jobs" and found.importer != "jobs.cli"
    return inside and found.module not in SHARED | VERBS.get(found.importer, set())


def loads(found: Import, packages: set[str]) -> bool:
    return found.module.split(".")[0] in packages and found.at_top and not found.types_only


WRONG_IMPORTS: dict[str, Callable[[Import], bool]] = {
    "up": goes_up,
    "up, inside a room": goes_up_inside,
    "of a plugin": names_a_plugin,
    "of another verb": stands_on_a_verb,
    "of what launches, inside a job": lambda it: (
        room(it.importer) in INSIDE_A_JOB and room(it.module) == "trainkit.launch"
    ),
    "of torch at the top, where nothing trains": lambda it: (
        loads(it, {"torch"}) and room(it.importer) not in TORCH_ROOMS
    ),
    "of heavy packages at the top": lambda it: loads(it, HEAVY - {"torch"}) and room(it.importer) != "trainkit.swarm",
    "of hivemind, outside the network of the swarm": lambda it: (
        it.module.split(".")[0] == "hivemind" and not it.importer.startswith("trainkit.swarm.network.")
    ),
    "of submitit, outside the module that writes its pickles": lambda it: (
        it.module.split(".")[0] == "submitit" and it.importer != "trainkit.cluster.pickles"
    ),
}


@pytest.mark.parametrize("kind", WRONG_IMPORTS)
def test_no_import_is_wrong(kind: str) -> None:
    assert listed(found for found in imports() if WRONG_IMPORTS[kind](found)) == []


def test_every_room_has_a_floor() -> None:
    assert listed(room(name) for name in modules() if name != "trainkit" and room(name) not in HEIGHT) == []


@pytest.mark.parametrize("place", RULES["folders"])
def test_every_folder_of_a_room_is_in_its_order(place: str) -> None:
    parts = [name.removeprefix(f"{place}.").split(".") for name in modules() if name.startswith(f"{place}.")]
    assert {part[0] for part in parts} == set(RULES["folders"][place])


def test_no_module_needs_itself() -> None:
    """No circle among the imports; one that only types need, or a function, is an arrow like any other."""
    loaded: dict[str, set[str]] = {}
    for item in imports():
        if item.module in modules():
            loaded.setdefault(item.importer, set()).add(item.module)
    circle: list[str] = []
    try:
        TopologicalSorter(loaded).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


# Who may do what


def reads_the_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return bool({alias.name for alias in node.names} & {"environ", "getenv"})
    return isinstance(node, ast.Attribute) and written(node) in ("os.environ", "os.getenv", "os.environb")


def names_slurm(node: ast.AST) -> bool:
    """Who must know something of a run's scheduler asks it: `named(plan.executor).batch`."""
    return isinstance(node, ast.Constant) and node.value == "slurm"


def commands_slurm(node: ast.AST) -> bool:
    """Whether it is a command, or a call, whose first word is one of SLURM's programs."""
    words = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.List | ast.Tuple) else []
    first = words[0] if words else None
    return isinstance(first, ast.Constant) and first.value in SLURMS_PROGRAMS


@cache
def strategy_options() -> frozenset[str]:
    names = plugins.available("trainkit.distributed.strategies")
    return frozenset(
        option for name in names for option in plugins.signature("trainkit.distributed.strategies", name).options
    )


def knows_a_strategy(node: ast.AST) -> bool:
    """Whether code goes by a strategy's name, or reads an option of one: a user's own would be treated otherwise."""
    if isinstance(node, ast.Compare):
        sides = [written(side) for side in (node.left, *node.comparators)]
        return any(re.search(r"\bstrategy\.name$", side) for side in sides)
    return isinstance(node, ast.Constant) and node.value in strategy_options()


def modes_of(call: ast.Call) -> list[str]:
    given = [item.value for item in (*call.args, *(k.value for k in call.keywords)) if isinstance(item, ast.Constant)]
    return [mode for mode in given if isinstance(mode, str) and re.fullmatch("[rwabtx+]{1,3}", mode)]


def reads_a_file(node: ast.AST) -> bool:
    """A sparse file of 300 GB takes no space, and one reader without a bound hangs or kills all who list runs."""
    if not isinstance(node, ast.Call):
        return False
    name = written(node.func)
    if READING_CALLS.fullmatch(name):
        return True
    if name == "os.open":
        return not re.search("O_WRONLY|O_APPEND", written(node))
    if name != "open" and not name.endswith(".open"):
        return False
    modes = modes_of(node)
    return any("r" in mode or "+" in mode for mode in modes) or (name == "open" and not modes)


def starts_a_program(node: ast.AST) -> bool:
    """A squeue of 300 MB took 4 GB and became an event; one in Latin-1 ended the command with a traceback."""
    return isinstance(node, ast.Call) and STARTING_CALLS.fullmatch(written(node.func)) is not None


def writes_a_file(node: ast.AST) -> bool:
    """Links are followed, partial files foreseen, and modes left to the umask wherever somebody opens one by hand."""
    name = written(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name.startswith("fileio."):
        return False
    if name == "os.open":
        return re.search("O_(CREAT|WRONLY|RDWR|APPEND|TRUNC)", written(node)) is not None
    last = name.split(".")[-1]
    if (
        last in ("open", "fdopen")
        and name != "tarfile.open"
        and any(set(mode) & set("wxa+") for mode in modes_of(node))
    ):
        return True
    return name in WRITING or last in WRITING


def patches(node: ast.AST, foreign: set[str]) -> bool:
    """Whether it changes attributes of these imported names, or ``sys.modules``.

    The switches of `torch.backends` are settings.
    """
    if isinstance(node, ast.Call):
        name = written(node.func)
        if name in ("setattr", "delattr"):
            return written(node.args[0]).split(".")[0] in foreign
        return re.match(r"sys\.modules\.(?!get|items)", name) is not None
    if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
        return False
    name = written(node)
    if name.startswith(("sys.modules", "torch.backends.", "os.environ", "sys.path")):
        return name.startswith("sys.modules")
    return isinstance(node, ast.Attribute) and re.split(r"[.\[(]", name)[0] in foreign


def changes_a_library(name: str) -> bool:
    found = {item.module.split(".")[0] for item in imports() if item.importer == name and not ours(item.module)}
    for node in nodes(name):
        if isinstance(node, ast.Import | ast.ImportFrom) and not ours(getattr(node, "module", node.names[0].name)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return any(patches(node, found) for node in nodes(name))


def overrides_hivemind(name: str) -> bool:
    """Whether a class is made from one of hivemind's, which another version may have changed."""
    imported = {"hivemind"}
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "hivemind":
            imported |= {alias.asname or alias.name for alias in node.names}
    bases = [base for node in nodes(name) if isinstance(node, ast.ClassDef) for base in node.bases]
    return any(written(base).split(".")[0] in imported for base in bases)


MESSAGES = {part for item in folder.MESSAGES for part in re.split("({})", item.name) if "." in part}


def spells_a_message(node: ast.AST) -> bool:
    """A reader that spells a name by itself waits for a file that its writer has renamed."""
    return isinstance(node, ast.Constant) and str(node.value).removeprefix("rank-{}") in MESSAGES


def somewhere(check: Callable[[ast.AST], bool]) -> Callable[[str], bool]:
    return lambda name: any(map(check, nodes(name)))


def writes_events(node: ast.AST) -> bool:
    """Else than by the functions of `trainkit.run.events`, which give each event its fields."""
    return isinstance(node, ast.Call) and written(node.func).endswith("append_event")


def updates_weights(node: ast.AST) -> bool:
    """A loop that has an update of its own would clip, skip and scale otherwise than all others."""
    own = {"backward", "zero_grad", "clip_grad_norm_", "clip_grads_with_norm_"}
    return getattr(node, "attr", getattr(node, "id", None)) in own


# A rule finds the modules that do something; `architecture.yaml` lists those that may. A strategy and SLURM's room know
# themselves.
ONLY: dict[str, Callable[[str], bool]] = {
    "reads the environment": somewhere(reads_the_environment),
    "names SLURM": somewhere(names_slurm),
    "runs SLURM's programs": somewhere(commands_slurm),
    "knows a strategy": somewhere(knows_a_strategy),
    "reads files": somewhere(reads_a_file),
    "writes files": somewhere(writes_a_file),
    "names a message between processes": somewhere(spells_a_message),
    "starts programs": somewhere(starts_a_program),
    "writes events": somewhere(writes_events),
    "updates weights": somewhere(updates_weights),
    "overrides hivemind": overrides_hivemind,
    "changes other libraries": changes_a_library,
}
THEMSELVES = {
    "names SLURM": "trainkit.cluster.slurm",
    "runs SLURM's programs": "trainkit.cluster.slurm",
    "knows a strategy": "trainkit.distributed.strategies",
}


@pytest.mark.parametrize("what", ONLY)
def test_only_the_modules_that_are_listed_do_so(what: str) -> None:
    """And each of them does: a rule that no longer sees anything would be noticed."""
    may, themselves = set(RULES["only"][what]), THEMSELVES.get(what, "no.room")
    found = {name for name in modules() if not name.startswith(themselves) and ONLY[what](name)}
    assert listed(found - may) == [], f"{what}, and is not listed"
    assert listed(may - found) == [], f"{what} no longer: take it off the list"
    assert what != "reads the environment" or len(may) <= 8


def test_commands_and_a_dry_run_never_load_torch(tmp_path: Path) -> None:
    names = sorted(name for name in modules() if name.startswith("jobs."))
    code = (
        f"import os, sys, {', '.join(names)}; jobs.submit.main(['ddp', '--nodes', '2', '--dry-run'], dict(os.environ));"
        f"print([m for m in {sorted(HEAVY | {'submitit', 'rich'})} if m in sys.modules])"
    )
    done = python("-c", code, cwd=tmp_path, PATH=str(tmp_path))  # without a SLURM
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_every_error_for_users_says_what_why_and_how_to_fix_it() -> None:
    short = [
        f"{name}:{node.lineno}"
        for name in modules()
        for node in nodes(name)
        if isinstance(node, ast.Call) and written(node.func) in ERRORS
        if None not in (given := {keyword.arg for keyword in node.keywords}) and not {"why", "fix"} <= given
    ]
    assert short == []


# Sizes and names


_ACCELERATOR = re.compile(r"cuda|nccl|\bhip\b|xpu|\bmps\b", re.I)
_KNOW_ACCELERATORS = ("trainkit/common/accelerators.py", "trainkit/distributed/device.py", "trainkit/diagnosis/")


def test_two_files_know_the_kinds_of_accelerators() -> None:
    """And the tables of causes, which quote what others print; elsewhere a few words for people name one."""
    files = [name for name in tracked() if name.startswith(("trainkit/", "jobs/")) and name.endswith(".py")]
    found = [
        f"{name}: {line.strip()}"
        for name in files if not name.startswith(_KNOW_ACCELERATORS)
        for line in (PROJECT / name).read_text("utf-8").splitlines() if _ACCELERATOR.search(line)
    ]  # fmt: skip
    assert len(found) <= 15, found


@cache
def tracked() -> list[str]:
    """Files that git knows, or will with the next `git add`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.splitlines() if (PROJECT / name).is_file()]


def test_nothing_else_lies_at_the_top() -> None:
    top = {name.split("/")[0] for name in tracked()}
    assert listed(name for name in top if name not in TOP and not name.startswith(".")) == []


@cache
def code_lines(name: str) -> int:
    """Lines of a long file that hold code: in Python those with a token that is neither comment nor docstring."""
    text = (PROJECT / name).read_text("utf-8")
    if not name.endswith(".py") or text.count("\n") <= LONGEST:
        return len(text.splitlines())
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in skipped]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def test_no_file_is_long() -> None:
    endings = (".py", ".yaml", ".json", ".sbatch", ".sh", "devcluster")
    names = [name for name in tracked() if not name.startswith("tests/") and name.endswith(endings)]
    assert [name for name in names if name not in LONG and code_lines(name) > LONGEST] == []


def test_a_file_name_stands_for_one_thing() -> None:
    """But for plugins. Each room may have a base; a verb of ``jobs`` may be called as what it is the command of."""
    of_plugins = {module for package in PLUGINS for module in members(package)}
    files = [file for module, file in modules().items() if module not in of_plugins and room(module) != "jobs"]
    names = Counter(file.name for file in files)
    assert {name for name, count in names.items() if count > 1 and name not in ("base.py", "__init__.py")} == set()


def test_names_of_tests_can_be_read_at_a_glance() -> None:
    files = [PROJECT / name for name in tracked() if name.startswith("tests/") and name.endswith(".py")]
    tests = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
    names = [name for file in files for name in tests.findall(file.read_text("utf-8"))]
    assert [name for name in names if len(name) > LONGEST_NAME] == []


# Speed


def cpu_seconds(*words: str, cwd: Path) -> float:
    before = os.times()
    python(*words, cwd=cwd)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def is_quick(*words: str, limit: float, cwd: Path) -> bool:
    """Whether Python takes less than so many times the CPU time that it needs to load the configuration's libraries, in
    one of three pairs: what else this machine does makes both slower."""
    controls = (cpu_seconds("-c", "import argparse, pydantic, yaml", cwd=cwd) for _ in range(3))
    return any(cpu_seconds(*words, cwd=cwd) < limit * control for control in controls)


@pytest.mark.nightly
def test_an_answer_comes_at_once(tmp_path: Path) -> None:
    limits = {"--help": 2, "ddp --nodes 2 --dry-run": 8, "ddp optim.wieght_decay=1": 5, "ddp model.name=resnett18": 7}
    for arguments, limit in limits.items():
        assert is_quick("-m", "jobs.submit", *arguments.split(), limit=limit, cwd=tmp_path), arguments


HELPS = """
import argparse, os, runpy, sys, time, pydantic, yaml
control = time.process_time()
for verb in sys.argv[1:]:
    words = verb.split()
    if not os.fork():
        sys.argv = [words[0], *words[1:], "--help"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        runpy.run_module(f"jobs.{words[0]}", run_name="__main__", alter_sys=True)
    used = os.wait3(0)[2]
    if used.ru_utime + used.ru_stime > 2.2 * control:
        print(verb)
"""
"""Print the verbs whose help takes more than 2.2 times what it takes to load the configuration's libraries."""


@pytest.mark.nightly
def test_the_help_of_every_verb_comes_at_once(tmp_path: Path) -> None:
    """In 0.2 s of a machine on which that control takes 0.08 s."""
    slow = [*verbs(PROJECT / "jobs"), "swarm create", "cluster check"]
    assert len(slow) >= 20
    for _ in range(3):  # what else this machine does makes some slower
        if slow:
            slow = python("-c", HELPS, *slow, cwd=tmp_path).stdout.splitlines()
    assert slow == [], "import in its functions what these verbs do not need for --help"
