"""A run of somebody else's may name code. No verb runs it unless the user says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit import plugins
from trainkit.config.loading import load, to_yaml
from trainkit.errors import RefusedError
from trainkit.records.ownership import require_own_code
from trainkit.records.rundir import RunDir

Command = Callable[..., Any]
MARK = "it-ran"


def made(path: Path, *overrides: str) -> RunDir:
    """A run whose snapshot holds a module that leaves a mark when it is imported."""
    run = RunDir.create(path, to_yaml(load("ddp", overrides).config))
    run.code.mkdir()
    (run.code / "strange.py").write_text(f"open({str(path.parent / MARK)!r}, 'w')\ndef build(root): ...\n")
    return run


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """From now on the user is one who has made no run."""
    return lambda: monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))


@pytest.mark.parametrize(
    "verb", ["evaluate", "train", "submit", "submit --dry-run", "launch", "resume", "swarm create"]
)
def test_no_verb_runs_code_that_a_strangers_run_names(
    command: Command, forget: Callable[[], None], no_slurm: dict[str, str], tmp_path: Path, verb: str
) -> None:
    run = made(tmp_path / "ddp-0001", "data.name=strange:build")
    forget()
    name, *flags = verb.split()
    done = command(name, *flags, str(run.path))
    assert done.code == 3, done.err
    assert "data.name=strange:build" in done.err
    assert "--allow-code" in done.err
    assert not (tmp_path / MARK).exists()


@pytest.mark.parametrize("verb", ["resume", "launch"])
def test_a_strangers_snapshot_is_not_started(
    command: Command, forget: Callable[[], None], no_slurm: dict[str, str], tmp_path: Path, verb: str
) -> None:
    """They start the program in code/, whatever the configuration names."""
    run = made(tmp_path / "ddp-0001")
    forget()
    done = command(verb, str(run.path))
    assert (done.code, run.attempts()) == (3, [])
    assert str(run.code) in done.err


def test_the_configuration_of_a_strangers_run_is_no_preset(
    command: Command, forget: Callable[[], None], tmp_path: Path
) -> None:
    run = made(tmp_path / "ddp-0001", "data.name=strange:build")
    forget()
    assert command("submit", str(run.config), "--dry-run").code == 3


SETTINGS = [
    "data.name=strange:build", "model.name=strange:build", "strategy.name=strange:build", "model.name=local-dir:/x",
    "launch.setup=[touch it]", "launch.sbatch.prolog=x", "launch.srun.task-prolog=x", "launch.cluster=devcluster",
    "launch.environment=venv:/x", "launch.modules=[evil]", "launch.container_image=x.sif",
    "launch.container_mounts=[/x:/usr]",
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_everything_that_imports_or_starts_something_counts(
    forget: Callable[[], None], tmp_path: Path, setting: str
) -> None:
    run = made(tmp_path / "ddp-0001", setting)
    require_own_code(run.path, load(str(run.path)), allow_code=False)  # the user's own
    forget()
    with pytest.raises(RefusedError, match=".".join(setting.split("=")[0].split(".")[:2])):
        require_own_code(run.path, load(str(run.path)), allow_code=False)
    require_own_code(run.path, load(str(run.path)), allow_code=True)


def test_weights_that_were_started_from_count_unless_nothing_unpickles_them(
    forget: Callable[[], None], tmp_path: Path
) -> None:
    overlay = "model.pretrained_cfg_overlay={{file: /w/{}}}".format
    runs = [made(tmp_path / name, "model.name=resnet18", overlay(name)) for name in ("w.safetensors", "w.bin")]
    forget()
    require_own_code(runs[0].path, load(str(runs[0].path)), allow_code=False)
    with pytest.raises(RefusedError, match=r"w\.bin"):
        require_own_code(runs[1].path, load(str(runs[1].path)), allow_code=False)


def test_a_strangers_run_of_what_we_have_is_evaluated_and_repeated(
    command: Command, forget: Callable[[], None], no_slurm: dict[str, str], tmp_path: Path
) -> None:
    run = made(tmp_path / "ddp-0001")
    forget()
    assert command("submit", str(run.path), "--dry-run").code == 0


def test_what_the_user_puts_in_its_place_is_theirs(forget: Callable[[], None], tmp_path: Path) -> None:
    run = made(tmp_path / "ddp-0001", "data.name=strange:build")
    forget()
    require_own_code(run.path, load(str(run.path), ["data.name=digits"]), allow_code=False)
    require_own_code(run.path, load(str(run.path), ["data.name=mine:build"]), allow_code=False)


def test_a_folder_in_its_place_that_belongs_to_another_is_not_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "ddp-0001", "data.name=strange:build")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(RefusedError, match="would run code"):
        require_own_code(run.path, load(str(run.path)), allow_code=False)


def test_a_snapshot_that_anybody_may_write_to_is_not_ones_own(tmp_path: Path) -> None:
    run = made(tmp_path / "ddp-0001", "data.name=strange:build")
    (run.code / "strange.py").chmod(0o666)
    with pytest.raises(RefusedError) as caught:
        require_own_code(run.path, load(str(run.path)), allow_code=False)
    assert "Anybody may write to" in caught.value.why


def test_ones_own_run_is_ones_own_through_a_link(tmp_path: Path) -> None:
    run = made(tmp_path / "real" / "ddp-0001", "data.name=strange:build")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    require_own_code(tmp_path / "link" / run.name, load(str(run.path)), allow_code=False)


def test_a_runs_own_module_is_found_in_its_snapshot_before_the_folder_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    for folder, value in ((here, 1), (tmp_path / "code", 2)):
        folder.mkdir()
        (folder / "model_in_two_places.py").write_text(f"def build(): return {value}\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugins.search_first(tmp_path / "code")
    assert plugins.load("trainkit.models", "model_in_two_places:build")() == 2
