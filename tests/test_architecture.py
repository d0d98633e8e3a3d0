"""The arrows of the house: who may import whom, who may load what, and how long a file and a command may be."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from trainkit import plugins
from trainkit.run import messages

PROJECT = Path(__file__).resolve().parents[1]

# Floors, from the ground up. Imports go down only: not up, not sideways between the rooms of one floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "trainkit.errors",
        "trainkit.importing",
        "trainkit.process",
        "trainkit.terminal",
        "trainkit.watcher",
    ),
    ("trainkit.programs", "trainkit.fileio", "trainkit.workarounds"),
    ("trainkit.plugins",),
    ("trainkit.config",),
    ("trainkit.run",),
    ("trainkit.ranks",),
    ("trainkit.schedulers.base",),
    ("trainkit.schedulers.states",),
    ("trainkit.site",),
    ("trainkit.diagnosis", "trainkit.monitor", "trainkit.report"),
    ("trainkit.launch",),
    ("trainkit.schedulers",),
    ("trainkit.distributed",),
    ("trainkit.strategies", "trainkit.data", "trainkit.checkpoint", "trainkit.models", "trainkit.tasks"),
    ("trainkit.checking", "trainkit.training"),
    ("trainkit.experiment",),
    ("trainkit.bench", "trainkit.swarm", "trainkit.inference"),
    ("trainkit.worker", "trainkit.finish", "trainkit.log_book"),
    ("trainkit.start",),
    ("trainkit.resumption",),
    ("jobs", "trainkit.interactive"),
    ("trainkit.__main__",),
    ("trainkit",),
)
# Nothing inside a job needs what puts jobs onto machines.
NOT_INSIDE_A_JOB = {"trainkit.launch"}
INSIDE_A_JOB = {
    "trainkit.distributed", "trainkit.strategies", "trainkit.data", "trainkit.checkpoint", "trainkit.models",
    "trainkit.training", "trainkit.experiment", "trainkit.swarm", "trainkit.inference", "trainkit.monitor",
    "trainkit.bench", "trainkit.tasks",
}  # fmt: skip
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

# Models and tasks are built for the data that they see: they name that type, and load nothing of it.
TYPES_ONLY = {
    ("trainkit.models", "trainkit.data"),
    ("trainkit.tasks", "trainkit.data"),
    ("trainkit.schedulers.base", "trainkit.site"),
    ("trainkit.schedulers.base", "trainkit.launch"),
}

# Packages with plugins: one must not know another.
PLUGINS = (
    "trainkit.strategies", "trainkit.data.datasets", "trainkit.models", "trainkit.tasks", "trainkit.monitor",
    "trainkit.schedulers",
)  # fmt: skip

# What is no verb but shared by verbs. Beyond that one verb may stand on another that it continues:
SHARED = {"jobs", "jobs.cli", "jobs.elsewhere", "jobs.sending", "jobs.dry_run"}
VERBS = {
    "jobs.why": {"jobs.status"},  # whose forecast it tells
    "jobs.resume": {"jobs.swarm"},  # a swarm that was started in a terminal goes on there
    "jobs.train": {"jobs.join"},
    "jobs.completion": {"jobs.__main__"},  # which lists the verbs
    "jobs.swarm": {"jobs.join"},  # the same peer, of a swarm that someone else created
}

TORCH_ROOMS = {
    "trainkit.distributed", "trainkit.strategies", "trainkit.data", "trainkit.checkpoint", "trainkit.models",
    "trainkit.training", "trainkit.experiment", "trainkit.swarm", "trainkit.inference", "trainkit.bench",
    "trainkit.tasks",
}  # fmt: skip
HEAVY = {"torch", "torchvision", "timm", "wandb", "tensorboard", "hivemind", "matplotlib", "sklearn", "fsspec"}

# The environment is read at the doors, and handed down as a mapping. These are all of them: at most eight.
ENVIRONMENT = {
    "jobs.cli": "the door of the commands",
    "trainkit.interactive": "the door of notebooks and scripts",
    "trainkit.worker": "the door of a rank, which submitit calls",
    "trainkit.process": "the door of `python -m` programs; what this process was granted; what libraries read",
    "trainkit.run.folder": "TRAINKIT_RUN_MODE, XDG_STATE_HOME: who may enter a run, and where the user's state is",
    "trainkit.schedulers.slurm_programs": "hands this process's own environment on, less what changes the answers",
    "trainkit.distributed.device": "TRAINKIT_DEVICE, SLURM_*_GPUS: which GPUs this process was granted",
    "trainkit.monitor.wandb": "WANDB_*: the client's own settings, never ours to store",
}

# Files are read by trainkit/fileio.py, which bounds them. What else opens or parses one, and why:
READERS = {
    "trainkit.fileio": "is the reader and the writer",
    "trainkit.config.yaml": "hands the reader's bytes to PyYAML, and counts what that composes",
    "trainkit.diagnosis.causes": "reads causes.yaml, which is part of the package",
    "trainkit.run.snapshot": "walks a folder of code and unpacks its archive, files and bytes counted",
    "trainkit.ranks.signals": "maps the page that this rank's own launcher has made",
    "trainkit.data.pack": "maps a pack into memory, of the size that its verified index says",
    "trainkit.data.datasets.fashion_mnist": "unpacks an archive, of which it takes a bounded part",
    "trainkit.data.download": "hashes archives part by part, and bounds what it fetches and unpacks",
    "trainkit.checkpoint.format": "hashes weights part by part once their size is right; parses what was read bounded",
    "trainkit.checkpoint.transfer": "unpacks the code of a run in a bucket, its members bounded",
    "trainkit.checkpoint.weights": "loads the file of weights that the user names, as weights only",
    "trainkit.checkpoint.tensors": "maps safetensors, whose header its library bounds",
    "trainkit.checkpoint.save": "takes what ranks of the same run say to one another",
    "trainkit.distributed.process_group": "takes what ranks of the same run say to one another",
    "trainkit.distributed.health": "takes what ranks of the same check say to one another",
    "trainkit.bench.run": "takes what ranks of the same bench say to one another",
    "trainkit.monitor.wandb": "takes what the process that has started it says",
    "jobs.elsewhere": "unpacks the report that the user's own account has sent, its members bounded",
    "jobs.sending": "packs the user's own files",
}
READING_CALLS = re.compile(
    r"(json|yaml|numpy|np|torch|pickle|tomllib|csv|ast)\.(load|loads|load_all|safe_load|fromfile|memmap|genfromtxt|reader)"
    r"|gzip\.(decompress|open)|tarfile\.open|zipfile\.ZipFile|mmap\.mmap|urllib\.request\.urlopen|load_file|safe_open"
    r"|(?!fileio\.).*\.(read_text|read_bytes)"
)

# Other programs are asked by trainkit/programs.py, which bounds what they say. What else starts one, and why:
STARTERS = {
    "trainkit.programs": "is who asks",
    "trainkit.site.ssh": "passes on what ssh says as it comes; what comes before that is bounded",
    "trainkit.launch.node_check": "passes on what ranks of a check say as it comes; their result is bounded",
    "trainkit.launch.supervisor": "starts ranks, which write to their logs",
    "trainkit.schedulers.local": "starts the controller of a local job, which writes to a log",
    "trainkit.swarm.local_ranks": "starts ranks, which write to the terminal of rank 0",
    "trainkit.monitor.wandb": "starts a client, whose stdout is closed",
    "jobs.launch": "becomes the program that runs its ranks in a container",
}
STARTING_CALLS = re.compile(
    r"subprocess\.\w+|os\.(system|popen|fork|forkpty|(spawn|exec|posix_spawn)\w*)|pty\.(spawn|fork)"
    r"|asyncio\.(subprocess\.)?create_subprocess_\w+|(utils\.)?CommandFunction"
)

ERRORS = {"UserError", "RefusedError", "SchedulerError", "RunFailedError", "TrainkitError"}

LONGEST = 500
LONG = {
    "slurm/devcluster": "one file that can be copied to any machine",
    "configs/schema.json": "generated",
    "trainkit/config/schema.py": "every setting, with its documentation: 380 lines of code",
    "trainkit/diagnosis/causes.yaml": "data: a row with the texts that prove it is one row of one table",
    "trainkit/diagnosis/causes.py": "reads the table and fills in its sentences: 460 lines of code",
    "trainkit/diagnosis/evidence.py": "reads what ranks and srun leave in their logs: 380 lines of code",
}

# `logbook` is where the recipes put what is handed in.
TOP = {
    "configs", "docs", "jobs", "logbook", "slurm", "tests", "trainkit", "pyproject.toml",
    "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md",
}  # fmt: skip


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
def imports() -> tuple[Import, ...]:
    """Every import of every module, those inside functions included."""
    return tuple(found for name, file in modules().items() for found in imports_of(name, file.read_text("utf-8")))


def imports_of(importer: str, source: str) -> Iterator[Import]:
    """The imports in one file."""

    def walk(node: ast.AST, at_top: bool, types_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            top = at_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            types = types_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
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

    yield from walk(ast.parse(source), True, False)


def room(module: str) -> str:
    """The room that a module of ours is in."""
    if module in HEIGHT:  # a protocol lies below the plugins that keep it
        return module
    first, *rest = module.split(".")
    return first if first == "jobs" or not rest else f"{first}.{rest[0]}"


def ours(module: str) -> bool:
    return module.split(".")[0] in ("jobs", "trainkit")


def listed(items: object) -> list[str]:
    return sorted({str(item) for item in items})  # type: ignore[attr-defined]


# Arrows


def test_every_room_has_a_floor() -> None:
    assert listed(room(name) for name in modules() if name != "trainkit" and room(name) not in HEIGHT) == []


def test_imports_go_down_only() -> None:
    wrong = [
        found
        for found in imports()
        if ours(found.module) and found.module != "trainkit" and room(found.module) != room(found.importer)
        if HEIGHT[room(found.module)] >= HEIGHT[room(found.importer)]
        if not (found.types_only and (room(found.importer), room(found.module)) in TYPES_ONLY)
    ]
    assert listed(wrong) == []


@pytest.mark.parametrize("package", PLUGINS)
def test_plugins_do_not_know_each_other(package: str) -> None:
    members = {f"{package}.{name}" for name in plugins.available(package)}
    assert members
    wrong = [item for item in imports() if item.importer in members and item.module in members - {item.importer}]
    assert listed(wrong) == []


@pytest.mark.parametrize("package", PLUGINS)
def test_what_plugins_share_does_not_know_them(package: str) -> None:
    """To add a plugin is to add a file: nobody else names it."""
    members = {f"{package}.{name}" for name in plugins.available(package)}
    assert listed(item for item in imports() if item.module in members and item.importer != item.module) == []


def test_verbs_stand_on_their_own() -> None:
    wrong = [
        found
        for found in imports()
        if room(found.importer) == room(found.module) == "jobs" and found.importer != "jobs.cli"
        if found.module not in SHARED | VERBS.get(found.importer, set())
    ]
    assert listed(wrong) == []


def test_nothing_inside_a_job_needs_what_launches_it() -> None:
    wrong = [
        found for found in imports() if room(found.importer) in INSIDE_A_JOB and room(found.module) in NOT_INSIDE_A_JOB
    ]
    assert listed(wrong) == []


def test_no_module_needs_itself() -> None:
    """No circle among the imports that happen when a module is loaded."""
    loaded = {
        name: {i.module for i in imports() if i.importer == name and i.at_top and not i.types_only}
        for name in modules()
    }
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in finished:
            for other in sorted(loaded[name] & loaded.keys()):
                visit(other, (*path, name))
            finished.add(name)

    for name in sorted(loaded):
        visit(name, ())


# Who may load what


def test_torch_is_imported_at_the_top_only_where_training_is() -> None:
    wrong = [
        found
        for found in imports()
        if found.module.split(".")[0] == "torch" and found.at_top and not found.types_only
        if room(found.importer) not in TORCH_ROOMS
    ]
    assert listed(wrong) == []


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    wrong = [
        found
        for found in imports()
        if found.module.split(".")[0] in HEAVY - {"torch"} and found.at_top and not found.types_only
        if room(found.importer) != "trainkit.swarm"
    ]
    assert listed(wrong) == []


def test_only_collaboration_knows_hivemind() -> None:
    known = [item for item in imports() if item.module.split(".")[0] == "hivemind"]
    assert known
    assert listed(item for item in known if room(item.importer) != "trainkit.swarm") == []


# Who holds the name of SLURM as a text, besides its scheduler, and why:
SLURM = {
    "trainkit.ranks.env": "a launcher: srun tells a rank its place",
    "trainkit.distributed.device": "the same launcher: srun binds its tasks",
    "trainkit.run.snapshot": "the folder of templates, which is no code of a run",
    "jobs.__main__": "the folder of templates",
}
SLURMS_PROGRAMS = {"squeue", "sacct", "sacctmgr", "scontrol", "sinfo", "sbatch", "scancel", "srun", "sshare", "sstat"}
# `sbatch` and `srun` are settings, too: mappings of these programs' own options.
OPTIONS_OF_PROGRAMS = {
    "trainkit.config.schema", "trainkit.config.slurm_options", "trainkit.launch.plan", "trainkit.launch.resources",
    "trainkit.start", "jobs.cli",
}  # fmt: skip


def is_slurms(module: str) -> bool:
    return module.startswith("trainkit.schedulers.slurm")


def test_slurm_is_named_by_its_scheduler_alone() -> None:
    """Who must know something of a run's scheduler asks it: `named(plan.executor).batch`."""
    named = where(lambda node: isinstance(node, ast.Constant) and node.value == "slurm")
    require = {name for name in named if not is_slurms(name)}
    assert require == set(SLURM)


def commands_slurm(node: ast.AST) -> bool:
    """Whether it is a command, or a call, whose first word is one of SLURM's programs."""
    words = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.List | ast.Tuple) else []
    first = words[0] if words else None
    return isinstance(first, ast.Constant) and first.value in SLURMS_PROGRAMS


def test_slurms_programs_are_run_by_its_scheduler_alone() -> None:
    """Six others ran them once, with three patiences and three kinds of error."""
    running = {name for name in where(commands_slurm) if not is_slurms(name)}
    assert running <= OPTIONS_OF_PROGRAMS, running - OPTIONS_OF_PROGRAMS
    assert {name for name in where(commands_slurm) if is_slurms(name)}


@pytest.mark.parametrize("code", ["ask('squeue', '-h')", "run(['scontrol', 'ping'])", "shutil.which('sbatch')"])
def test_a_command_of_slurms_is_seen(code: str) -> None:
    assert any(map(commands_slurm, ast.walk(ast.parse(code))))


def test_only_the_base_of_the_schedulers_knows_submitit() -> None:
    known = {item.importer for item in imports() if item.module.split(".")[0] == "submitit"}
    assert known == {"trainkit.schedulers.base"}


def test_the_environment_is_read_at_eight_doors_at_most() -> None:
    readers = {
        name
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
    }
    assert listed(readers ^ ENVIRONMENT.keys()) == []
    assert len(ENVIRONMENT) <= 8


def where(does: Callable[[ast.AST], bool]) -> dict[str, list[int]]:
    """The modules in which a node of the syntax tree does that, with its lines."""
    found = {
        name: [node.lineno for node in ast.walk(ast.parse(file.read_text("utf-8"))) if does(node)]  # type: ignore[attr-defined]
        for name, file in modules().items()
    }
    return {name: lines for name, lines in found.items() if lines}


def require_only(does: Callable[[ast.AST], bool], may: Iterable[str]) -> None:
    """These modules do that, all of them, and no other one does."""
    found = where(does)
    assert {name: lines for name, lines in found.items() if name not in may} == {}
    assert listed(set(may) - found.keys()) == [], "does so no longer: take it off the list"


@cache
def strategy_options() -> frozenset[str]:
    names = plugins.available("trainkit.strategies")
    return frozenset(option for name in names for option in plugins.signature("trainkit.strategies", name).options)


def knows_a_strategy(node: ast.AST) -> bool:
    """Whether code goes by a strategy's name, or reads an option of one, instead of asking `trainkit.config.checks`."""
    if isinstance(node, ast.Compare):
        sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
        return any(re.search(r"\bstrategy\.name$", side) for side in sides)
    return isinstance(node, ast.Constant) and node.value in strategy_options()


def test_nobody_else_knows_a_strategy_by_its_name_or_options() -> None:
    """What others must know of one its file states: a user's own is then treated alike."""
    others = {name for name in where(knows_a_strategy) if room(name) != "trainkit.strategies"}
    assert listed(others) == []


@pytest.mark.parametrize(
    "code",
    ["config.strategy.name == 'fsdp'", "p.config.strategy.name in ('a', 'b')", "strategy.options.get('comm_hook')"],
)
def test_going_by_a_strategys_name_or_options_is_seen(code: str) -> None:
    assert any(map(knows_a_strategy, ast.walk(ast.parse(code))))


def reads_a_file(node: ast.AST) -> bool:
    """Whether a call reads a file, or parses what may be one, by other means than `trainkit.fileio`."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if READING_CALLS.fullmatch(name):
        return True
    if name == "os.open":
        return not re.search("O_WRONLY|O_APPEND", ast.unparse(node))
    if name != "open" and not name.endswith(".open"):
        return False
    given = [item.value for item in (*node.args, *(k.value for k in node.keywords)) if isinstance(item, ast.Constant)]
    modes = [mode for mode in given if isinstance(mode, str) and re.fullmatch("[rwabtx+]{1,3}", mode)]
    return any("r" in mode or "+" in mode for mode in modes) or (name == "open" and not modes)


def test_files_are_read_by_the_one_reader_that_bounds_them() -> None:
    """A sparse file of 300 GB takes no space, and one reader without a bound hangs or kills all who list runs."""
    require_only(reads_a_file, READERS)


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("path.read_text()", True),
        ("(a / b).read_bytes()", True),
        ("json.loads(text)", True),
        ("path.open('rb')", True),
        ("open(name)", True),
        ("os.open(name, os.O_RDONLY)", True),
        ("fileio.read_text(path)", False),
        ("path.open('w')", False),
        ("os.open(name, os.O_CREAT | os.O_WRONLY)", False),
        ("RunDir.open(path)", False),
    ],
)
def test_a_call_that_reads_a_file_is_told_from_others(source: str, reads: bool) -> None:
    assert reads_a_file(ast.parse(source, mode="eval").body) == reads


def starts_a_program(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and STARTING_CALLS.fullmatch(ast.unparse(node.func)) is not None


def test_programs_are_asked_by_the_one_who_bounds_their_answers() -> None:
    """A squeue of 300 MB took 4 GB and became an event; one in Latin-1 ended the command with a traceback."""
    require_only(starts_a_program, STARTERS)


@pytest.mark.parametrize(
    "call",
    ["subprocess.run(words)", "subprocess.check_output(words)", "os.popen(text)", "utils.CommandFunction(words)()"],
)
def test_a_call_that_starts_a_program_is_seen(call: str) -> None:
    assert any(map(starts_a_program, ast.walk(ast.parse(call))))


# Only these change other libraries, or what Python has imported. hivemind's bounds and checks have no other place.
PATCHING = {
    "trainkit.workarounds": "the one file for it",
    "trainkit.swarm.access": "hivemind keeps and reads any number of records",
    "trainkit.swarm.exchange": "hivemind answers any number of calls",
    "trainkit.swarm.averager": "hivemind forms groups with anybody",
    "trainkit.swarm.processes": "hivemind starts libp2p's daemon, which must end with its peer",
}


def patches(tree: ast.Module) -> list[int]:
    """Lines that assign to attributes of what was imported from elsewhere, or change ``sys.modules``.

    The switches of `torch.backends` are settings.
    """
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names if not ours(alias.name)}
        elif isinstance(node, ast.ImportFrom) and not ours(str(node.module)):
            foreign |= {alias.asname or alias.name for alias in node.names}

    def is_foreign(target: ast.AST) -> bool:
        name = re.sub(r"[\[(].*", "", ast.unparse(target))
        if name.startswith(("torch.backends.", "os.environ", "sys.path")):
            return False
        return name.startswith("sys.modules") or (isinstance(target, ast.Attribute) and name.split(".")[0] in foreign)

    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [item for target in node.targets for item in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "it")]
        elif isinstance(node, ast.Call) and re.match(r"sys\.modules\.(?!get|items)", ast.unparse(node.func)):
            targets = [node.func]
        if any(map(is_foreign, targets)):
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


def test_other_libraries_are_changed_in_one_file_only() -> None:
    found = {name for name, file in modules().items() if patches(ast.parse(file.read_text("utf-8")))}
    assert listed(found ^ PATCHING.keys()) == []


@pytest.mark.parametrize(
    ("line", "is_patch"),
    [
        ("sys.modules['boto3'] = None", True),
        ("sys.modules.setdefault('notf', it)", True),
        ("del sys.modules['torch._dynamo']", True),
        ("torch._dynamo = it", True),
        ("Run.start = it", True),
        ("setattr(Run, 'start', it)", True),
        ("torch.optim.Optimizer.step, other = it", True),
        ("torch.backends.cudnn.benchmark = True", False),
        ("os.environ['A'] = 'b'", False),
        ("self.step = torch.ones(1)", False),
        ("sys.path[:] = []", False),
    ],
)
def test_a_line_that_changes_a_library_is_seen(line: str, is_patch: bool) -> None:
    tree = ast.parse(f"import os, sys, torch\nfrom wandb import Run\n{line}")
    assert bool(patches(tree)) == is_patch


# Of these modules each opens, makes or links something itself, besides `trainkit.fileio`, which all others use.
WRITERS = {
    "jobs.cli": "/dev/null in the place of a closed pipe",
    "trainkit.site.node_health": "measures a disk with a file that has no name",
    "trainkit.checkpoint.transfer": "second names for files of a checkpoint, in a folder that it has just made",
    "trainkit.distributed.device": "a switch of the kernel in /proc",
    "trainkit.ranks.signals": "a file of its own that ranks map into memory; its name is random",
    "trainkit.run.lease": "a hard link, which of several at once only one can make",
    "trainkit.run.folder": "the run's own folder, and that of the user's state",
    "trainkit.run.snapshot": "the folder in which runs share their code, and a hard link to its archive",
}
_WRITING = {
    *("write_text", "write_bytes", "touch", "mkdir", "makedirs", "chmod", "symlink_to", "hardlink_to", "symlink"),
    *("os.link", "os.open", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "urlretrieve", "extractall"),
    *("copyfile", "copy2", "copytree", "shutil.copy", "shutil.move", "save_file", "SummaryWriter", "FileHandler"),
}


def _writes(node: ast.AST) -> bool:
    """Whether a call opens a file for writing, or makes something by a path."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if name == "os.open" and not re.search("O_(CREAT|WRONLY|RDWR|APPEND|TRUNC)", ast.unparse(node)):
        return False
    if name.startswith("fileio."):
        return False
    if name.split(".")[-1] in ("open", "fdopen") and name != "tarfile.open":
        words = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
        modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        if any(re.fullmatch("[rwxabt+]{1,3}", word) and set(word) & set("wxa+") for word in modes):
            return True
    return name in _WRITING or name.split(".")[-1] in _WRITING


def test_one_module_writes_files() -> None:
    """Links are followed, partial files foreseen, and modes left to the umask wherever somebody opens one by hand."""
    require_only(_writes, {*WRITERS, "trainkit.fileio"})


@pytest.mark.parametrize(
    "call",
    ["open(p, 'w')", "p.open('ab+')", "p.write_text('')", "os.open(p, os.O_CREAT | os.O_WRONLY)", "shutil.copy(a, b)"],
)
def test_writing_by_hand_is_seen(call: str) -> None:
    assert _writes(ast.parse(call, mode="eval").body)


def test_messages_between_processes_are_named_in_one_place() -> None:
    """A reader that spells a name by itself waits for a file that its writer has renamed."""
    parts = {part for item in messages.MESSAGES for part in re.split("({})", item.name) if "." in part}
    assert parts == {"lease.json", "preflight.json", ".hang"}
    spelled = where(lambda node: isinstance(node, ast.Constant) and str(node.value).removeprefix("rank-{}") in parts)
    assert listed(spelled) == ["trainkit.run.messages"]


def test_the_commands_never_load_torch_before_they_train() -> None:
    names = sorted(name for name in modules() if name.startswith("jobs."))
    code = f"import sys, {', '.join(names)}; print([m for m in {sorted(HEAVY)} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_checking_a_submission_never_loads_torch(tmp_path: Path) -> None:
    code = (
        "import os, sys; from jobs.submit import main; main(['ddp', '--nodes', '2', '--dry-run'], dict(os.environ));"
        f"print([m for m in {sorted(HEAVY)} if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_every_error_for_users_says_what_why_and_how_to_fix_it() -> None:
    short = [
        f"{name}:{node.lineno}"
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS
        if None not in (given := {keyword.arg for keyword in node.keywords}) and not {"why", "fix"} <= given
    ]
    assert short == []


# Size and speed


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


def code_lines(file: Path) -> int:
    """Lines of a file that hold code: in Python those with a token that is neither comment nor docstring."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        return len(text.splitlines())
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in skipped]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def test_no_file_is_long() -> None:
    long = {
        name: lines
        for name in tracked()
        if not name.startswith("tests/") and name.endswith((".py", ".yaml", ".json", ".sbatch", ".sh", "devcluster"))
        if name not in LONG and (lines := code_lines(PROJECT / name)) > LONGEST
    }
    assert long == {}


def cpu_seconds(*command: str, cwd: Path) -> float:
    """CPU time of a Python process: its own, whatever else this test session runs."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    quiet = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, *command], cwd=cwd, env=env, stdout=quiet, stderr=quiet) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["--help"], 2),
        (["ddp", "--dry-run"], 8),
        (["ddp", "--nodes", "2", "--dry-run"], 8),
        (["ddp", "optim.wieght_decay=1"], 5),
        (["ddp", "model.name=resnett18"], 7),
        (["ddp", "train.global_batch_size=10", "train.micro_batch_size=4"], 5),
    ],
    ids=str,
)
def test_an_answer_comes_at_once(arguments: list[str], limit: float, tmp_path: Path) -> None:
    """In few times what Python needs to load the configuration's libraries; side by side, as machines differ."""
    control, ours = ["-c", "import argparse, pydantic, yaml"], ["-m", "jobs.submit", *arguments]
    pairs = [(cpu_seconds(*ours, cwd=tmp_path), cpu_seconds(*control, cwd=tmp_path)) for _ in range(3)]
    assert min(pair[0] for pair in pairs) / min(pair[1] for pair in pairs) < limit


# The README


def readme() -> str:
    file = PROJECT / "README.md"
    if not file.is_file() and os.environ.get("CI", "").lower() not in ("true", "1"):
        pytest.skip("README.md is not written yet")
    return file.read_text("utf-8")


def test_every_link_of_the_readme_resolves() -> None:
    text = re.sub(r"```.*?```", "", readme(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere: tests do without a network
        if (path and not (PROJECT / path).exists()) or (not path and anchor not in anchors):
            broken.append(target)
    assert broken == []


def test_every_command_of_the_readme_is_there() -> None:
    verbs = set(re.findall(r"python3? -m jobs\.(\w+)", readme()))
    assert "submit" in verbs
    assert {verb for verb in verbs if f"jobs.{verb}" not in modules()} == set()


def test_every_file_that_the_readme_names_is_there() -> None:
    named = set(re.findall(r"(?<![\w/.])(?:slurm|configs|jobs|trainkit|tests)/[\w./-]*\w", readme()))
    assert {name for name in named if not (PROJECT / name).exists()} == set()
