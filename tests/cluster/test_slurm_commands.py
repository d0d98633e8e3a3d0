"""Rows of squeue and sacct on jobs and on the tasks of arrays, as SLURM 22.05.8 has printed them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.conftest import make_run
from trainkit.cluster.job_states import job_states
from trainkit.cluster.slurm_commands import Jobs, read_peak_memory, read_sacct, read_squeue, tasks_in
from trainkit.run.events import append_event

FakeCommand = Callable[[str, str], Path]

FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
CANCELLED_AFTER_TWO = """\
19446662_0|CANCELLED by 0|0:0|n1
19446662_1|CANCELLED by 0|0:0|n1
19446662_[2-11%2]|CANCELLED by 0|0:0|None assigned
"""
CANCELLED_AT_ONCE = """\
19446651_0|CANCELLED by 0|0:0|n1
19446651|CANCELLED by 0|0:0|None assigned
"""
SOME_CANCELLED = """\
19446665_0|RUNNING|0:0|n1
19446665_1|FAILED|1:0|n1
19446665_[2,4,6,9-11%2]|PENDING|0:0|None assigned
"""


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1", [1]),
        ("1%1", [1]),
        ("2,4,6,9-11%2", [2, 4, 6, 9, 10, 11]),
        ("6-12:2%3", [6, 8, 10, 12]),
        ("105-120:5", [105, 110, 115, 120]),
        ("3-4,6-7", [3, 4, 6, 7]),
        ("", []),
        ("0x3F", []),  # another way to write it is not guessed at
    ],
)
def test_the_list_of_an_arrays_tasks_is_read(text: str, numbers: list[int]) -> None:
    assert [number for part in tasks_in(text) for number in part] == numbers


def test_a_list_that_is_cut_off_may_hold_all_from_its_last_number_on() -> None:
    parts = tasks_in("3-4,6-7,9-10...%2")
    assert [number for number in (2, 3, 4, 5, 6, 8, 9, 10, 11, 900) if any(number in part for part in parts)] == [
        3, 4, 6, 9, 10, 11, 900,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "job_id", "state"),
    [
        (CANCELLED_AFTER_TWO, "19446662_11", "CANCELLED"),
        (CANCELLED_AFTER_TWO, "19446662_12", None),
        (CANCELLED_AFTER_TWO, "1944666_2", None),
        (CANCELLED_AT_ONCE, "19446651_5", "CANCELLED"),
        (SOME_CANCELLED, "19446665_1", "FAILED"),
        (SOME_CANCELLED, "19446665_9", "PENDING"),
        (SOME_CANCELLED, "19446665_3", None),
        ("17|COMPLETED|0:0|n1\n", "17", "COMPLETED"),
        ("17|COMPLETED|0:0|n1\n", "17_3", None),
        (f"17_[{','.join(map(str, range(0, 4000, 2)))}]|PENDING|0:0|None assigned\n", "17_3998", "PENDING"),
    ],
)
def test_a_task_that_has_not_begun_is_in_a_row_of_several(text: str, job_id: str, state: str | None) -> None:
    found = Jobs(read_sacct(text)).of(job_id)
    assert (found.state if found is not None else None) == state
    assert found is None or found.job_id == job_id


def test_the_queue_has_one_row_for_all_that_was_cancelled_at_once() -> None:
    queue = Jobs(read_squeue("19446651|CANCELLED|JobArrayTaskLimit|0:00||\n19446651_0|RUNNING|None|0:02|n1|\n"))
    states = [queue.of("19446651_0"), queue.of("19446651_4")]
    assert [(state.state, state.reason) for state in states if state is not None] == [
        ("RUNNING", ""), ("CANCELLED", "it has not begun"),
    ]  # fmt: skip


def test_a_cancelled_sweep_is_cancelled_also_where_it_never_began(tmp_path: Path, fake_command: FakeCommand) -> None:
    fake_command("squeue", FORGOTTEN)
    asked = fake_command("sacct", f"cat <<'E'\n{CANCELLED_AFTER_TWO}E")
    runs = [make_run(tmp_path / str(at), executor="slurm", job_id=f"19446662_{at}") for at in range(12)]
    assert {state.state for state in job_states(runs)} == {"CANCELLED"}
    assert "-j 19446662 " in asked.read_text(), "asked for a task that never began, sacct says nothing"


def test_a_task_that_was_cancelled_alone_before_it_began_has_no_row(tmp_path: Path, fake_command: FakeCommand) -> None:
    """And one that began, and of which the accounts do not know yet, is not taken for it."""
    fake_command("squeue", FORGOTTEN)
    fake_command("sacct", f"cat <<'E'\n{SOME_CANCELLED}E")
    waited, began = (make_run(tmp_path / at, executor="slurm", job_id=f"19446665_{at}") for at in "35")
    (began.logs / "0").mkdir(parents=True)
    assert [state.state for state in job_states([waited, began])] == ["CANCELLED", "UNKNOWN"]


def test_without_accounts_the_record_says_that_a_job_was_cancelled(tmp_path: Path, fake_command: FakeCommand) -> None:
    fake_command("squeue", FORGOTTEN)
    fake_command("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    run = make_run(tmp_path / "run", executor="slurm", job_id="7")
    append_event(run, "submitted", executor="slurm", job_id="8")
    append_event(run, "cancelled", job_id="7")
    other = make_run(tmp_path / "other", executor="slurm", job_id="9_3")
    append_event(other, "cancelled", job_id="9_3")
    assert [state.state for state in job_states([run, other])] == ["UNKNOWN", "CANCELLED"]


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [
        ("0:0", ""),
        ("1:0", "exit code 1:0"),
        ("15:0", "exit code 15:0; older versions of sacct also show 143 so"),
        ("127:0", "exit code 127:0; older versions of sacct also show 255 so"),
        ("143:0", "exit code 143:0"),
        ("0:53", "exit code 0:53"),
        ("0:125", "exit code 0:125"),
    ],
)
def test_sacct_may_have_left_out_128_of_an_exit_code(exit_code: str, reason: str) -> None:
    assert read_sacct(f"7|FAILED|{exit_code}|n1\n")["7"].reason == reason


def test_the_whole_exit_code_is_asked_for_while_the_controller_knows_it(
    tmp_path: Path, fake_command: FakeCommand
) -> None:
    fake_command("squeue", "echo '7|FAILED|NonZeroExitCode|0:00|n1'")
    fake_command("scontrol", "echo 'JobId=7 JobState=FAILED Reason=NonZeroExitCode DerivedExitCode=0:0 ExitCode=143:0'")
    run = make_run(tmp_path / "run", executor="slurm", job_id="7")
    assert job_states([run])[0].reason == "exit code 143:0"


def test_lists_of_tasks_are_asked_for_in_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_command: FakeCommand
) -> None:
    """SLURM cuts them after 64 characters, or where a user has said."""
    monkeypatch.setenv("SLURM_BITSTR_LEN", "5")
    for name in ("squeue", "sacct"):
        fake_command(name, f'echo "$SLURM_BITSTR_LEN" > {tmp_path / name}')
    job_states([make_run(tmp_path / "run", executor="slurm", job_id="7_1")])
    assert [(tmp_path / name).read_text() for name in ("squeue", "sacct")] == ["0\n", "0\n"]


def test_the_memory_of_ranks_is_that_of_the_widest_step() -> None:
    text = "17||\n17.batch|1|37.81M\n17.0|4|1304.61M\n17.1|1|9000M\n17.extern|2|0\n"
    assert read_peak_memory(text) == 1304.61
    assert read_peak_memory("17||\n17.batch|1|37M\n") is None
