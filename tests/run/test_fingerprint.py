from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainkit.config.loading import load
from trainkit.run import folder
from trainkit.run.folder import RunDir
from trainkit.run.snapshot import digest_of, fingerprint, same_runs


def mark_of(*overrides: str, code: str = "c") -> str:
    return fingerprint(load("ddp", overrides).config, code)


def test_where_a_run_trains_does_not_make_it_another() -> None:
    assert mark_of("launch.partition=gpu", "launch.time=10") == mark_of()


@pytest.mark.parametrize("override", ["launch.nodes=2", "launch.gpus_per_node=2", "launch.ntasks_per_node=2"])
def test_on_more_ranks_it_is_another_for_that_is_how_scaling_is_measured(override: str) -> None:
    assert mark_of(override) != mark_of()


@pytest.mark.parametrize("override", ["seed=1", "optim.lr=1e-4", "model.width=8", "data.root=elsewhere"])
def test_any_other_setting_makes_it_another(override: str) -> None:
    assert mark_of(override) != mark_of()


def test_other_code_makes_it_another(tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text("width = 3\n")
    before = digest_of([("my_model.py", file)])
    assert digest_of([("other.py", file)]) != before
    file.write_text("width = 4\n")
    assert digest_of([("my_model.py", file)]) != before
    assert mark_of(code="d") != mark_of(code="c")


def test_other_data_in_the_same_folder_makes_it_another(tmp_path: Path) -> None:
    root = f"data.root={tmp_path}"
    (tmp_path / "train").mkdir()
    (tmp_path / "train.bin").write_bytes(b"1")
    before = mark_of(root)
    assert mark_of(root) == before
    (tmp_path / ".lock").touch()
    assert mark_of(root) == before, "a hidden file is nobody's data"
    (tmp_path / "train.bin").write_bytes(b"22")
    changed = mark_of(root)
    assert changed != before
    (tmp_path / "train" / "cat").mkdir()
    assert mark_of(root) != changed


def run_of(path: Path, mark: str) -> RunDir:
    run = RunDir.create(path, "seed: 0\n")
    run.manifest.write_text(f'{{"fingerprint": "{mark}"}}')
    folder.mark(path, mark)
    return run


def test_the_same_runs_are_found_by_their_mark_while_they_are_what_they_were(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "a", "m1"), run_of(tmp_path / "b", "m1")
    other, replaced = run_of(tmp_path / "c", "m2"), run_of(tmp_path / "d", "m1")
    run_of(tmp_path / "e", "m1").config.unlink()
    replaced.manifest.write_text('{"fingerprint": "m9"}')
    assert same_runs(["m1", "m2", "m3"]) == {"m1": [first, second], "m2": [other]}


def test_a_look_among_thousands_of_runs_opens_none_of_them(tmp_path: Path) -> None:
    run = run_of(tmp_path / "mine", "mine")
    with (Path(folder.own_file("fingerprints"))).open("a") as file:
        file.writelines(f"{number:032x} /runs/ddp-{number:05d}\n" for number in range(20_000))
    looked_at: set[str] = set()
    listening = [True]

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "open":
            looked_at.add(str(arguments[0]))

    sys.addaudithook(listen)
    try:
        assert same_runs(["mine"]) == {"mine": [run]}
    finally:
        listening.clear()  # a hook stays for ever
    assert not [path for path in looked_at if path.startswith("/runs/")]
    assert str(run.manifest) in looked_at
