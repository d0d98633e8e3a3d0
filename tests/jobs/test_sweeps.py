from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import last_event
from trainkit import fileio
from trainkit.errors import UserError
from trainkit.report.document import NONE
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.start import sweep_points

Command = Callable[..., Any]
SEEDS = ("submit", "ddp", "--nodes", "2", "--sweep", "seed=0..6")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=0..4", ["0", "1", "2", "3", "4"]),
        ("seed=7..7", ["7"]),
        ("seed=-1..1", ["-1", "0", "1"]),
        ("seed=0..8..4", ["0", "4", "8"]),
        ("seed=0..8..3,42", ["0", "3", "6", "42"]),
        ("data.root=../a,../b", ["../a", "../b"]),
        ("optim.lr=1e-3,3e-3", ["1e-3", "3e-3"]),
    ],
)
def test_a_range_is_its_whole_numbers_with_both_ends(text: str, values: list[str]) -> None:
    key = text.partition("=")[0]
    assert sweep_points([text]) == [[f"{key}={value}"] for value in values]


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [
        (["seed=4..0"], "no such range"),
        (["seed=0..4..0"], "no such range"),
        (["seed=0..99999999"], "no such range"),
        (["optim.lr=1e-4..1e-3"], "whole numbers"),
        (["seed=0..999", "optim.lr=1,2,3,4,5,6,7,8,9,10,11"], "11000 runs"),
    ],
)
def test_a_range_that_nobody_can_mean_is_refused(sweeps: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        sweep_points(sweeps)


@pytest.fixture
def small_arrays(fake_slurm: Path) -> Path:
    """A site whose arrays have 3 tasks at most; every sbatch is job 4711, 4712, ... and keeps its script."""
    before = (fake_slurm / "scontrol").read_text()
    config = "if [ $2 = config ]; then echo 'MaxArraySize            = 3'; exit; fi"
    (fake_slurm / "scontrol").write_text(before.replace("\n", f"\necho $* >> {fake_slurm}/asked\n{config}\n", 1))
    (fake_slurm / "sbatch").write_text(
        f'#!/bin/bash\nid=$((4711 + $(ls {fake_slurm} | grep -c "^47")))\n'
        f'cat "${{@: -1}}" > {fake_slurm}/$id\necho $id\n'
    )
    return fake_slurm


def directive(script: Path, name: str) -> str | None:
    found = re.search(rf"^#SBATCH --{name}=(.*)$", script.read_text(), flags=re.MULTILINE)
    return found[1] if found else None


def job_of(run: Path) -> str:
    return str((last_event(RunDir(run), "submitted") or {})["job_id"])


def test_more_runs_than_an_array_may_have_are_several_arrays(
    command: Command, small_arrays: Path, tmp_path: Path
) -> None:
    done = command(*SEEDS)
    assert done.code == 0, done.err
    sweep = tmp_path / "runs" / "ddp-0001"
    assert [directive(small_arrays / job, "array") for job in ("4711", "4712", "4713")] == ["0-2", "0-2", None]
    jobs = [job_of(sweep / str(index)) for index in range(7)]
    assert jobs == ["4711_0", "4711_1", "4711_2", "4712_0", "4712_1", "4712_2", "4713"]
    assert "Submitted job 4711 (array of 3)" in done.out
    assert "4712: 3 more" in done.out
    assert (small_arrays / "asked").read_text().count("show config") == 1
    # The array's third task, wherever it is told of, is the sweep's run 5.
    script = (small_arrays / "4712").read_text()
    part = sweep / ".submitit" / "array-1"
    assert f'TRAINKIT_RUN_DIR="$(readlink -f {part}/"$SLURM_ARRAY_TASK_ID")"\n' in script
    assert directive(small_arrays / "4712", "output") == f"{part}/%a/logs/batch.out"
    assert (part / "2").resolve() == sweep / "5"
    assert (part / ".submitit" / "4712_2_submitted.pkl").is_file()
    assert f"TRAINKIT_RUN_DIR={sweep}/6\n" in (small_arrays / "4713").read_text()


def test_so_many_at_a_time_holds_for_all_arrays_together(command: Command, small_arrays: Path) -> None:
    assert command(*SEEDS, "--max-parallel", "2").code == 0
    assert directive(small_arrays / "4711", "array") == "0-2%2"
    assert directive(small_arrays / "4711", "dependency") is None
    assert directive(small_arrays / "4712", "dependency") == "afterany:4711"
    assert directive(small_arrays / "4713", "dependency") == "afterany:4712"


def test_a_dependency_may_name_a_sweep(command: Command, small_arrays: Path) -> None:
    assert command("submit", "ddp", "--sweep", "seed=0..2").code == 0
    done = command("submit", "ddp", "seed=9", "--dependency", "afterok:ddp-0001")
    assert done.code == 0, done.err
    assert directive(small_arrays / "4712", "dependency") == "afterok:4711"


def test_what_has_failed_of_a_sweep_is_queued_again_as_one_array(
    command: Command, small_arrays: Path, tmp_path: Path
) -> None:
    assert command("submit", "ddp", "--sweep", "seed=0..2").code == 0
    sweep = tmp_path / "runs" / "ddp-0001"
    (small_arrays / "squeue").write_text("#!/bin/bash\necho '4711_1|RUNNING|None|0:10|n1'\n")
    done = command("resume", "ddp-0001", "--time", "2:00:00", "--dry-run")
    assert done.code == 0, done.err
    append_event(RunDir(sweep / "1"), "ended", attempt=0, state="COMPLETED")
    for failed in ("0", "2"):
        append_event(RunDir(sweep / failed), "ended", attempt=0, state="FAILED")
    done = command("resume", "ddp-0001", "--time", "2:00:00")
    assert done.code == 0, done.err
    assert "Submitted job 4712 for 2 of 3 runs: 0, 2" in done.out
    assert [job_of(sweep / index) for index in "012"] == ["4712_0", "4711_1", "4712_1"]
    assert directive(small_arrays / "4712", "time") == "2:00:00"
    assert "time: '2:00:00'" in (sweep / "2" / "config.yaml").read_text()
    assert "seed: 2" in (sweep / "2" / "config.yaml").read_text()
    assert command("status", "ddp-0001").out.count("ddp-0001/") == 3, "the links are no runs of their own"


def test_what_a_site_refuses_of_a_sweep_is_refused_before_anything_is_queued(
    command: Command, small_arrays: Path, tmp_path: Path
) -> None:
    assert command("submit", "ddp", "--sweep", "seed=0..1").code == 0
    (small_arrays / "squeue").write_text("#!/bin/bash\n")
    scontrol = small_arrays / "scontrol"
    scontrol.write_text(scontrol.read_text().replace("PartitionName=main", "PartitionName=main AllowAccounts=proj42"))
    before = (tmp_path / "runs" / "ddp-0001" / "0" / "config.yaml").read_text()
    done = command("resume", "ddp-0001", "--account", "proj41")
    assert (done.code, "It lets in: proj42" in done.err) == (3, True), done.err
    assert (tmp_path / "runs" / "ddp-0001" / "0" / "config.yaml").read_text() == before
    assert not (small_arrays / "4712").exists()


def test_a_sweep_that_runs_or_is_done_has_nothing_to_queue(command: Command, small_arrays: Path) -> None:
    assert command("submit", "ddp", "--sweep", "seed=0..1").code == 0
    (small_arrays / "squeue").write_text('#!/bin/bash\nfor i in 0 1; do echo "4711_$i|RUNNING|None|0:10|n1"; done\n')
    done = command("resume", "ddp-0001")
    assert done.code == 2
    assert "2 runs are RUNNING" in done.err


def test_the_results_of_a_sweep_are_one_table_with_means_over_seeds(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    grid = ("--sweep", "optim.lr=1e-3,2e-3", "--sweep", "seed=0..1")
    assert command("submit", "ddp", "train.epochs=3", *grid).code == 0
    sweep = tmp_path / "runs" / "ddp-0001"
    for index, accuracy in enumerate((80.0, 82.0, 91.0)):
        run = RunDir(sweep / str(index))
        fileio.append_jsonl(run.metrics, {"step": 9, "epoch": 3.0, "split": "val", "loss": 0.5, "acc1": accuracy})
        run.summary.write_text(json.dumps({"outcome": "finished", "steps": 9, "best_step": 9, "train_seconds": 5.0}))
    append_event(RunDir(sweep / "3"), "failed", attempt=0, rank=0, error="boom")
    done = command("report", "ddp-0001")
    assert done.code == 0, done.err
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.out.splitlines() if "|" in line]
    assert rows[0][:4] == ["folder", "optim.lr", "seed", "val acc1"]
    assert [row[:4] for row in rows[2:6]] == [
        ["2", "2e-3", "0", "91.00"],
        ["1", "1e-3", "1", "82.00"],
        ["0", "1e-3", "0", "80.00"],
        ["3", "2e-3", "1", NONE],
    ]
    assert rows[5][-1] == "FAILED"
    assert rows[8:] == [["2e-3", "2", "91.00 (of 1)", NONE], ["1e-3", "2", "81.00 ± 1.41", NONE]]
    assert (sweep / "results.md").read_text().startswith("| folder | optim.lr |")
