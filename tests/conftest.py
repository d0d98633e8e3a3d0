"""Every test runs as a user who has nothing: no runs, no job around them, no keys, one thread.

What a test needs beyond that, it sets itself; `monkeypatch.setenv` in a test comes after this.
"""

import gc
import logging
import os
import shutil
import signal
import site
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile, zip_longest
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

from tests import scratch

# Of an outer job (the suite may itself run under SLURM or torchrun), or of a person.
FOREIGN_PREFIXES = (
    "SLURM", "SBATCH_", "SRUN_", "PMI", "OMPI_", "MPI_", "HYDRA_", "TORCHELASTIC_", "SUBMITIT_", "AZ_BATCH",
    "TRAINKIT_", "WANDB_", "AWS_", "HF_", "HUGGING_FACE_", "HIVEMIND_", "NCCL_", "GLOO_",
)  # fmt: skip
FOREIGN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "COLUMNS", "LINES",
)  # fmt: skip

# Processes get this one's module path, and find `tests` by it wherever they are started.
PROJECT = str(Path(__file__).parents[1])
if PROJECT not in sys.path:
    sys.path.append(PROJECT)
# Each of hundreds of processes would compile the whole kit anew. Here, for it must come before any fixture.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before torch is imported. Tests run side by side: more threads than one would only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

# Where most of the time is spent, the longest first, of what computes and of what waits for the cluster.
LONGEST = (
    "tests/swarm/test_swarm.py", "tests/docs/test_commands.py", "tests/training/test_parity.py",
    "tests/jobs/test_launch.py", "tests/training/test_optim.py", "tests/training/", "tests/jobs/",
    "tests/swarm/test_outer_step.py", "tests/test_gpu_benchmarks.py", "tests/test_install.py",
)  # fmt: skip
WAITING = ("tests/slurm/test_submit.py", "tests/slurm/test_train_sbatch.py", "tests/slurm/test_why.py", "tests/slurm/")

LONG_SECONDS = 3600.0

# What a test of the second list needs, `pytest -m nightly`: a cluster, peers of a swarm, a GPU or a simulated one, a
# browser, a wheel. Others are marked where they are, by what they cost: one and a half seconds of a core, or more.
NIGHTLY = "nightly and not long"  # as -m takes it
NIGHTLY_MARKS = ("gpu", "slurm", "swarm")
NIGHTLY_FIXTURES = {"browser", "gpu", "wheel"}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Home folder, state, runs and environment of this test alone. Beside tmp_path, which the test has for itself."""
    wandb_mode = os.environ.get("WANDB_MODE", "offline")
    for name in list(os.environ):
        if name in FOREIGN or name.startswith(FOREIGN_PREFIXES):
            monkeypatch.delenv(name)
    # Not state, and slow to make anew: packages installed for this user, matplotlib's list of fonts.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    monkeypatch.setenv("PYTHONUSERBASE", site.getuserbase())
    monkeypatch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR") or str(cache / "matplotlib"))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("TRAINKIT_RUNS", str(home / "runs"))
    monkeypatch.setenv("WANDB_MODE", wandb_mode)


# Before a test has a home of its own: what is built there once is for all sessions.
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")


@pytest.fixture(scope="session")
def gpu() -> dict[str, str]:
    """For `run_ranks`: ranks have a GPU, which is simulated where there is none (`tests.accelerator`)."""
    from tests.accelerator import building
    from trainkit.cluster.survey import local_gpus

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", CACHE)
        if not local_gpus(os.environ):
            if why := building.why_not():
                pytest.skip(why)
            building.build()
    return {"XDG_CACHE_HOME": CACHE}


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A command that ends leaves SIGTERM ignored or blocked: what later tests fork or start would be deaf to it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _imports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules that a test has written and imported are forgotten: others write files of the same names."""
    newest = next(reversed(sys.modules))
    yield
    base = str(tmp_path_factory.getbasetemp())
    for name in list(takewhile(lambda name: name != newest, reversed(sys.modules))):  # of thousands
        if str(getattr(sys.modules[name], "__file__", "")).startswith(base):
            del sys.modules[name]


@pytest.hookimpl(optionalhook=True)  # unknown without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: that of the cluster's tests waits more than it works."""
    return 1 + (os.cpu_count() or 1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what belongs to the second list by its needs, before ``-m`` chooses."""
    is_marked = any(item.get_closest_marker(name) for name in NIGHTLY_MARKS)
    needed = NIGHTLY_FIXTURES.intersection(getattr(item, "fixturenames", ()))
    if is_marked or needed:
        item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of minutes may hang for longer before it is failed than `timeout` in pyproject.toml says."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    place = {file: n for n, file in enumerate(in_order([item.nodeid.split("::")[0] for item in items]))}
    items.sort(key=lambda item: place[item.nodeid.split("::")[0]])


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: collections of garbage, one in each process group that is left, skip them."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Ranks are forked from this process as it is now: no test has begun, and no warning is an error."""
    if forks := sys.modules.get("tests.fork_server"):
        forks.server()


def in_order(files: Iterable[str]) -> list[str]:
    """The files of tests as they are to be started, each once.

    What takes longest starts first, or one worker would wait for the other in the end. Of those that wait for the
    cluster every second one is the next: the others compute meanwhile.
    """
    known = list(dict.fromkeys(files))

    def at(file: str, names: Sequence[str]) -> int:
        return next((n for n, name in enumerate(names) if file.startswith(name)), len(names))

    waiting = sorted((file for file in known if at(file, WAITING) < len(WAITING)), key=lambda file: at(file, WAITING))
    others = sorted((file for file in known if file not in waiting), key=lambda file: at(file, LONGEST))
    return [file for pair in zip_longest(others, waiting) for file in pair if file is not None]


SCRATCH = pytest.StashKey[Path]()
LEFT = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist would start with the files that have the most tests; the order above is better.

    What fixtures of a whole file train is no run of the person who tests either. All temporary files go with the
    session; those of the tests stay in FOLDER with ``--basetemp FOLDER``.
    """
    config.option.loadscopereorder = False
    gc.disable()  # until all tests are collected: until then there is no garbage
    # Else Python would print warnings of libraries among what commands say.
    logging.getLogger().addHandler(logging.NullHandler())
    if not hasattr(config, "workerinput"):  # its workers have it from their controller
        folder, remove = scratch.make()
        config.stash[SCRATCH] = folder
        # After multiprocessing has removed its own folder there (which has priority -100), and in no forked process.
        Finalize(None, remove, exitpriority=-200)
        if config.option.basetemp is None:
            config.option.basetemp = str(folder / "p")
    state = tempfile.mkdtemp(prefix="state-")
    os.environ["XDG_STATE_HOME"] = state
    config.add_cleanup(lambda: shutil.rmtree(state, ignore_errors=True))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Runs that were started from within this process have ended; without this they would be zombies.

    A session that leaves processes behind, or files that are ours, has failed.
    """
    if local := sys.modules.get("trainkit.cluster.local"):
        for controller in local.CONTROLLERS:
            controller.poll()
    if forks := sys.modules.get("tests.fork_server"):
        forks.stop()
    if (folder := session.config.stash.get(SCRATCH, None)) is not None:
        session.config.stash[LEFT] = left = scratch.left_in(folder)
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left behind."""
    for line in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"Left behind by the tests: {line}", red=True)
