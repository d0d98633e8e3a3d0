import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.diagnosis.score import answers
from trainkit.config.loading import load, to_yaml
from trainkit.data import build_data
from trainkit.diagnosis import causes
from trainkit.diagnosis.causes import TO_FILL_IN, Cause, cause_of, on_every_machine, rows, settings_of
from trainkit.errors import UserError
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.schedulers.base import JobState

ROWS: list[dict[str, Any]] = yaml.safe_load(Path(causes.__file__).with_name("causes.yaml").read_text())
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/lab/train.py", line 9, in <module>\n    main()\n{}\n'
UNKNOWN: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("unknown.yaml").read_text())


@pytest.fixture(scope="module")
def config() -> str:
    return to_yaml(load("ddp").config)


@pytest.fixture
def run(tmp_path: Path, config: str) -> RunDir:
    """A run of two ranks on n1 and n2 whose job 4711 is over."""
    made = RunDir.create(tmp_path / "runs" / "ddp-0001", config)
    made.attempt_logs(0).mkdir()
    made.plan.write_text(json.dumps({"time_limit_seconds": 3600, "world_size": 2, "ntasks_per_node": 1}))
    append_event(made, "submitted", executor="slurm", job_id="4711")
    for rank in (0, 1):
        (made.attempt_logs(0) / f"rank-{rank}.out").write_text("")
    return made


def diagnose(
    run: RunDir, job: str = "FAILED|NonZeroExitCode", *,
    batch: str = "", rank: str = "", nodes: str = "n[1-2]", executor: str = "slurm",
) -> Cause:  # fmt: skip
    if rank:
        (run.attempt_logs(0) / "rank-1.err").write_text(rank + "\n")
        if "srun: error: n2" not in batch:
            batch += "\nsrun: error: n2: task 1: Exited with exit code 1"
    if run.logs.exists():
        (run.logs / "batch.out").write_text(f"Attempt 0 on n[1-2]: the ranks' output is in {run.logs}/0\n{batch}\n")
    state, _, reason = job.partition("|")
    cause = cause_of(run, JobState(state, "4711", executor, reason.replace("None", ""), nodes))
    assert cause is not None
    return cause


def as_recorded(run: RunDir, said: dict[str, Any]) -> Cause:
    """The answer where a run has left what a recorded text holds."""
    for event in said.get("events", ()):
        append_event(run, event["event"], **{"attempt": 0, **event})
    if said.get("code") == "gone":
        run.code.symlink_to(run.path.parent / ".code" / "0123456789abcdef")
    if said.get("folder") == "gone":
        shutil.rmtree(run.path)
    cause = diagnose(run, **{key: said[key] for key in ("job", "batch", "rank", "nodes", "executor") if key in said})
    assert cause.evidence
    assert said.get("says", "") in cause.what
    assert said.get("command", "") in cause.command
    assert not re.search(r"[{}?]" if "says" in said else r"[{}]|--exclude *$", cause.what + cause.command)
    return cause


@pytest.mark.parametrize(
    ("index", "said"),
    [
        pytest.param(index, said, id=f"{row['name']}-{said['from']}")
        for index, row in enumerate(ROWS)
        for said in row["recorded"]
    ],
)
def test_what_was_printed_is_explained_by_its_row_and_no_other(run: RunDir, index: int, said: dict[str, Any]) -> None:
    cause = as_recorded(run, said)
    assert cause.row is rows()[index], f"{cause.row} takes it: {cause.what}"
    assert cause.name == ROWS[index]["name"]


@pytest.mark.parametrize("said", UNKNOWN, ids=[f"{item['cause']}-{item['from']}" for item in UNKNOWN])
def test_what_no_row_explains_is_told_in_its_own_words(run: RunDir, said: dict[str, Any]) -> None:
    cause = as_recorded(run, said)
    assert (cause.name, cause.row) == (said["cause"], None), cause.what


def test_each_row_has_a_recorded_text_and_one_command_without_a_placeholder() -> None:
    assert [row["name"] for row in ROWS if not row["recorded"]] == []
    assert [row.name for row in rows() if not row.command or "FOLDER" in row.command] == []


def test_9_in_10_public_failures_are_explained_and_none_wrongly() -> None:
    verdicts = Counter(answer.verdict for answer in answers())
    assert sum(verdicts.values()) == 117
    assert verdicts["right"] >= 106, verdicts
    assert [answer for answer in answers() if answer.verdict == "confidently wrong"] == []


def test_what_an_error_says_already_is_not_said_twice(run: RunDir) -> None:
    what, why = "train.class_weights has 2 weights, and digits has 10 classes.", "Each class has one."
    append_event(run, "failed", attempt=0, rank=1, host="n2", error=f"{what} {why}")
    cause = diagnose(run, rank=f"{what}\n  why: {why}\n  fix: Give 10.")
    assert (cause.what, cause.why) == (what, why)


def test_a_killed_rank_goes_before_those_that_missed_it(run: RunDir) -> None:
    append_event(run, "failed", attempt=0, rank=0, host="n1", error="RuntimeError: of a missed rank, unknown")
    cause = diagnose(run, batch="srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 1")
    assert cause.what.startswith("Rank 1 on n2 was killed")
    assert "srun: error: n2: task 1: Killed" in [quote.text for quote in cause.evidence]


MINE = TRACEBACK.format("ValueError: mine")
EXITED = "srun: error: n2: task 1: Exited with exit code {}"


@pytest.mark.parametrize(
    ("batch", "rank", "what"),
    [
        pytest.param(
            EXITED.format(3) + f"\n{ended}\nsrun: error: n1: task 0: Killed", "",
            "failed: Exited with exit code 3 (on n2).", id=f"not what was ended after {ended[:20]}",
        )
        for ended in (
            "srun: launch/slurm: _step_signal: Terminating StepId=12883802.0",  # to 22.05
            "srun: Terminating StepId=12883802.0",
            "slurmstepd-n1: error: *** STEP 12883802.0 ON n1 CANCELLED AT 2026-11-21T19:13:27 ***",
            "[2026-11-21T21:44:30.107] error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T21:44:30 ***",  # of 25.11
        )
    ]
    + [
        pytest.param(
            EXITED.format(7) + "\nsrun: error: n1: task 0: Exited with exit code 1", "",
            "failed: Exited with exit code 7 (on n2).", id="of srun's errors the first",
        ),
        pytest.param(
            "", "CUDA out of memory at first, going on with less\nKilled 3 zombies\nall good",
            "failed: Exited with exit code 1 (on n2); its last words: all good.", id="not what a healthy run prints",
        ),
        pytest.param(
            "", "warning: out of memory, retrying\nstep 4 loss nan\nepoch 3 done",
            "failed: Exited with exit code 1 (on n2); its last words: epoch 3 done.", id="not a warning before the end",
        ),
        pytest.param(
            "srun: error: n2: task 1: Segmentation fault (core dumped)",
            TRACEBACK.format("KeyError: 'dealt with'") + "Fatal Python error: Segmentation fault\n\n"
            'Current thread 0x7f (most recent call first):\n  File "/home/me/lab/model.py", line 77 in forward\n',
            "crashed in compiled code, at model.py:77.", id="a crash, not a traceback that the rank survived",
        ),
    ],
)  # fmt: skip
def test_the_cause_of_several_signs_is(run: RunDir, batch: str, rank: str, what: str) -> None:
    assert diagnose(run, batch=batch, rank=rank).what == f"Rank 1 on n2 {what}"


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("UserWarning: CUDA initialization: The NVIDIA driver on your system is too old\n", "", "ValueError: mine"),
        ("", "[W socket.cpp:464] [c10d] The server socket has failed to bind: Address already in use",
         "ValueError: mine"),
        (TRACEBACK.format("FileNotFoundError: No such file or directory: '/data/x'")
         + "\nDuring handling of the above exception, another exception occurred:\n\n", "", "ValueError: mine"),
        ("/tmp/x/main.c:4:10: fatal error: cuda.h: No such file or directory\n", "", "ValueError: mine"),
        ("", "", "AssertionError: Permission denied was to be handled"),
        ("", "", "RuntimeError: the queue's lock is held: Resource temporarily busy"),
        ("", "", "ValueError: this batch would give CUDA out of memory: No space left on device"),
    ],
    ids=[
        *("a warning before it", "others after it", "being handled", "a tool's"),
        *("its words", "words of no row", "two causes in its words"),
    ],
)  # fmt: skip
def test_an_error_of_ones_own_code_is_the_cause_and_not(run: RunDir, before: str, after: str, error: str) -> None:
    cause = diagnose(run, rank=before + TRACEBACK.format(error) + after)
    assert (cause.name, cause.fix) == ("exception", "Mend train.py:9:")
    assert f"raised {error}, at train.py:9" in cause.what


LIBRARY = '  File "/env/lib/python3.11/site-packages/lib/x.py", line 3, in f\n    g()\nValueError: odd'


@pytest.mark.parametrize(
    ("traceback", "fix"),
    [
        (MINE.replace("ValueError: mine", LIBRARY), "Look at train.py:9, which called this:"),
        (f"Traceback (most recent call last):\n{LIBRARY}", ""),
    ],
)
def test_an_error_inside_a_library_is_not_the_users_to_mend(run: RunDir, traceback: str, fix: str) -> None:
    assert diagnose(run, rank=traceback).fix == fix


def test_what_a_script_grumbles_of_is_no_cause_of_what_a_rank_raised(run: RunDir) -> None:
    batch = "bash: /etc/profile.d/site.sh: Permission denied\ncp: /tmp/x: No space left on device"
    assert diagnose(run, batch=batch, rank=MINE).name == "exception"
    (run.attempt_logs(0) / "rank-1.err").unlink()
    assert diagnose(run, batch=f"{batch}\n{EXITED.format(1)}").name == "disk-full", "it is all there is"


LR = "optim:\n  lr: {}\n"


@pytest.mark.parametrize(
    ("config", "error", "command"),
    [
        (LR.format("4.0e-3"), "FloatingPointError: the loss is nan", " optim.lr=0.002 "),
        (LR.format("0.4"), "FloatingPointError: the loss is nan", " optim.lr=0.2 "),
        ("train:\n  global_batch_size: 50\n", "torch.OutOfMemoryError: CUDA out of memory.", "micro_batch_size=5"),
        ("", "FileNotFoundError: [Errno 2] No such file or directory: '/x; touch y'", " ls -ld '/x; touch y'"),
        ("", "OSError: x: Could not resolve hostname lic7: Name or service not known", " getent hosts lic7"),
    ],
    ids=["half the rate", "of a high one", "half of a rank's 25", "one word", "its name"],
)
def test_the_command_has_the_runs_numbers_and_the_messages_names(
    run: RunDir, config: str, error: str, command: str
) -> None:
    run.config.write_text(config)
    assert command in diagnose(run, rank=TRACEBACK.format(error)).command


@pytest.mark.parametrize(("asked", "given"), [("16G", " --mem 32G"), ("0", ""), (None, " --mem 0")])
def test_more_memory_is_twice_what_was_asked_for(run: RunDir, asked: str | None, given: str) -> None:
    run.plan.write_text(json.dumps({"directives": [{"name": "mem", "value": asked}] if asked is not None else []}))
    cause = diagnose(run, batch="srun: error: n2: task 1: Out Of Memory")
    assert cause.command == f"python -m jobs.resume {run.path}{given}"


def test_a_failed_job_without_any_log_did_not_see_the_folder(run: RunDir) -> None:
    for log in run.attempt_logs(0).iterdir():
        log.unlink()
    run.attempt_logs(0).rmdir()
    (run.logs / "batch.out").unlink(missing_ok=True)
    found = [cause_of(run, JobState("FAILED", "4711", "slurm", "NonZeroExitCode", node)) for node in ("n2", "")]
    told = [cause.what for cause in found if cause is not None]
    assert told[0].startswith(f"n2 could not start its part of the job: it does not see {run.logs}")
    assert told[1].startswith("The job ended (FAILED NonZeroExitCode) before a rank of it said anything")


def test_a_rank_that_exited_without_a_log_did_not_see_the_folder(run: RunDir) -> None:
    """SLURM since 23.02 makes the folder there; 22.05 says "launch failed"."""
    (run.attempt_logs(0) / "rank-1.out").unlink()
    cause = diagnose(run, batch=EXITED.format(1))
    assert (cause.name, cause.command) == ("launch-failure", f"srun -N1 -n1 -w n2 ls -ld {run.logs}")
    said = "slurmstepd-n2: error: execve(): bash: No such file or directory"
    other = diagnose(run, batch=f"{said}\n{EXITED.format(2)}")
    assert other.name == "no-environment", "what SLURM says goes before what is not there"


def test_the_words_of_another_attempt_are_not_those_of_this(run: RunDir) -> None:
    run.attempt_logs(1).mkdir()
    (run.logs / "batch.out").write_text(
        "Attempt 0 on n1: ...\nsrun: error: n1: task 0: Killed\n"
        "Attempt 1 on n2: ...\nsrun: error: n2: task 0: Segmentation fault\n"
    )
    state = JobState("FAILED", "4711", "slurm")
    newest_and_first = [cause_of(run, state), cause_of(run, state, 0)]
    assert [cause.name for cause in newest_and_first if cause is not None] == ["segfault", "killed"]


def test_where_all_waited_the_rank_with_the_fewest_collectives_is_behind(run: RunDir) -> None:
    words = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)\nlast enqueued work: {}, last completed"
    (run.attempt_logs(0) / "rank-0.err").write_text(words.format(11))
    assert "rank 0 did not come to it" in diagnose(run, rank=words.format(12)).what


def test_a_spent_budget_is_no_cause_of_a_failure_but_of_saving_in_vain(run: RunDir) -> None:
    words = "not queued again: 2 restarts have not come to a checkpoint"
    append_event(run, "failed", attempt=0, rank=None, error=words)
    assert diagnose(run, batch="srun: error: n2: task 1: Killed").name == "killed"
    append_event(run, "handed_back", attempt=0, node_rank=0, step=1, signals=["SIGUSR2"])
    append_event(run, "failed", attempt=0, rank=None, error=words.replace("a checkpoint", "a new checkpoint"))
    cause = diagnose(run)
    assert (cause.name, cause.command) == ("no-progress", f"python -m jobs.resume {run.path} --time 2:00:00")


def test_a_run_that_completed_or_runs_has_no_cause(run: RunDir) -> None:
    (run.logs / "batch.out").write_text("srun: error: n2: task 1: Killed\n")
    assert cause_of(run, JobState("COMPLETED", "4711", "slurm")) is None
    assert cause_of(run, JobState("RUNNING", "4711", "slurm", "", "n[1-2]")) is None


def test_paths_in_a_command_are_quoted(tmp_path: Path, config: str) -> None:
    run = RunDir.create(tmp_path / "my runs" / "ddp-0001", config)
    append_event(run, "submitted", executor="slurm", job_id="4711")
    cause = cause_of(run, JobState("NODE_FAIL", "4711", "slurm", "NodeDown", "n2"))
    assert cause is not None
    assert cause.command == f"python -m jobs.resume '{run.path}' --exclude n2"


@pytest.mark.parametrize("module", ["trainkit", "my_model", "utils", "torchvision_of_somebody"])
def test_nobody_is_told_to_install_a_package_that_may_be_a_strangers(run: RunDir, module: str) -> None:
    cause = diagnose(run, rank=f"ModuleNotFoundError: No module named '{module}'")
    assert cause.name == "missing-module"
    assert "pip" not in cause.command + cause.fix


def test_the_node_of_a_rank_is_known_without_its_word(run: RunDir) -> None:
    (run.attempt_logs(0) / "rank-1.err").write_text(TRACEBACK.format("ValueError: mine"))
    assert diagnose(run).what.startswith("Rank 1 on n2 raised")


def no_splits(root: Path) -> tuple[int, int]:
    """A user's own data function, which is to return Splits."""
    return 1, 2


def test_own_code_to_be_mended_is_submitted_anew(run: RunDir) -> None:
    data = load("single", [f"data.name={__name__}:no_splits"]).config.data
    with pytest.raises(UserError, match="returned no Splits") as said:
        build_data(data)
    assert diagnose(run, rank=str(said.value)).command == f"python -m jobs.submit {run.path}"


def test_a_node_that_the_run_asks_for_by_name_is_not_excluded_as_well(run: RunDir) -> None:
    run.plan.write_text(json.dumps({"directives": [{"name": "nodelist", "value": "n[1-2]"}]}))
    cause = diagnose(run, "NODE_FAIL|NodeDown", batch="srun: error: Node failure on n2")
    assert (cause.command, "--nodelist" in cause.fix) == (f"python -m jobs.resume {run.path}", True)


def test_a_bench_is_not_said_to_go_on(run: RunDir) -> None:
    assert "jobs.resume" in diagnose(run, "CANCELLED|None").advice
    (run.path / "bench.json").write_text("{}")
    cause = diagnose(run, "CANCELLED|None")
    assert "jobs.resume" not in cause.advice
    assert f"jobs.bench --show {run.path}" in cause.advice


def test_what_the_ranks_of_all_nodes_say_blames_no_node(run: RunDir) -> None:
    words = TRACEBACK.format("RuntimeError: No CUDA GPUs are available")
    assert diagnose(run, rank=words).command.endswith(" --exclude n2"), "of one node it is told"
    (run.attempt_logs(0) / "rank-0.err").write_text(words)
    cause = diagnose(run, rank=words)
    assert (cause.name, cause.command) == ("cuda-sees-none", f"python -m jobs.resume {run.path}")
    assert cause.fix.startswith("Every node of the job says so")


@pytest.mark.parametrize(
    ("error", "place"),
    [
        ("OSError: [Errno 122] Disk quota exceeded: '{home}/.cache/matplotlib/f.json'", "{home}/.cache/matplotlib"),
        ("OSError: [Errno 28] No space left on device: '/tmp/torchinductor_me/x.cpp'", "/tmp/torchinductor_me"),
        ("PermissionError: [Errno 13] Permission denied: '/data/imagenet'", "/data/imagenet"),
        ("OSError: [Errno 28] No space left on device", "{run}"),
    ],
    ids=["a cache", "the node's disk", "the data", "nothing"],
)
def test_the_fix_looks_where_the_message_points(run: RunDir, error: str, place: str) -> None:
    known = {"home": str(Path.home()), "run": str(run.path.parent)}
    cause = diagnose(run, rank=TRACEBACK.format(error.format(**known)))
    assert re.search(rf"{re.escape(place.format(**known))}(/f\.json)?($|;| )", cause.command), cause.command


def test_of_a_job_of_this_machine_slurm_is_not_asked(run: RunDir) -> None:
    cause = cause_of(run, JobState("PENDING", "4711", "local", "waits"))
    assert cause is not None
    assert (cause.name, cause.command) == ("waits", f"python -m jobs.status {run.path}")


@pytest.mark.parametrize(
    "said",
    ["FileNotFoundError: [Errno 2] No such file or directory", "ModuleNotFoundError: No module named 'jobs.cli'"],
)
def test_code_that_was_removed_as_a_run_began_is_the_cause(run: RunDir, said: str) -> None:
    run.code.symlink_to(run.path.parent / ".code" / "0123456789abcdef")
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{said}'
    for words in ({"batch": traceback}, {"rank": traceback}):
        cause = diagnose(run, **words)
        assert (cause.name, cause.command) == ("code-gone", f"python -m jobs.resume {run.path}")
    run.code.unlink()
    run.code.mkdir()
    assert diagnose(run, rank=traceback).name != "code-gone"


TYPED = ["python", "-m", "jobs.launch", "ddp", "--nodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.7"]
TYPED += ["--master-port", "29500", "--secret-file", "run.secret", "--run-dir", "runs/a"]
TYPED += ["train.epochs=2", "optim.lr=0.1"]


def launched(folder: Path, *, executor: str = "launch", nodes: int = 2) -> RunDir:
    run = RunDir.create(folder / "runs" / "my run", to_yaml(load("ddp").config))
    run.plan.write_text(json.dumps({"nodes": nodes}))
    run.manifest.write_text(json.dumps({"command": TYPED}))
    append_event(run, "submitted", executor=executor, job_id="4711")
    return run


@pytest.mark.parametrize("before", ["", "HF_HUB_OFFLINE=1 ", "env -u CUDA_VISIBLE_DEVICES ", "A=1 B='x y' "])
def test_each_machine_goes_on_or_starts_anew_with_what_was_typed(tmp_path: Path, before: str) -> None:
    run = launched(tmp_path)
    flags = "--nodes 2 --node-rank 1 --master-addr 10.0.0.7 --secret-file run.secret"
    resumed = on_every_machine(run, f"{before}python -m jobs.resume '{run.path}' --exclude n1")
    assert resumed == f"{before}python -m jobs.launch '{run.path}' {flags}"
    anew = on_every_machine(run, f"{before}python -m jobs.submit '{run.path}' train.micro_batch_size=4")
    assert anew == f"{before}python -m jobs.launch ddp train.epochs=2 optim.lr=0.1 {flags} train.micro_batch_size=4"


@pytest.mark.parametrize(("executor", "nodes", "manifest"), [
    ("launch", 1, None), ("local", 2, None), ("slurm", 2, None), ("launch", 2, "[]"), ("launch", 2, '{"command": 3}'),
])  # fmt: skip
def test_where_one_machine_starts_it_or_nobody_knows_the_command_stays(
    tmp_path: Path, executor: str, nodes: int, manifest: str | None
) -> None:
    run = launched(tmp_path, executor=executor, nodes=nodes)
    if manifest is not None:
        run.manifest.write_text(manifest)
    command = f"python -m jobs.resume '{run.path}'"
    assert on_every_machine(run, command) == command


@pytest.mark.parametrize(
    ("what", "fix", "changes"),
    [
        ("", "Use train.global_batch_size=96 or 128.", ["train.global_batch_size=96"]),
        ("", "Use train.precision=bf16, or strategy.comm_hook=fp16.", ["train.precision=bf16"]),
        ("", "Give optim.lr=5e-4 train.grad_clip_norm=1.0.", ["optim.lr=5e-4", "train.grad_clip_norm=1.0"]),
        ("", 'Use model.freeze=["blocks.[0-5].*"].', ['model.freeze=["blocks.[0-5].*"]']),
        ("", "Give 10 numbers, or train.class_weights=balanced.", ["train.class_weights=balanced"]),
        ("", "Leave train.ema_decay out.", ["train.ema_decay=null"]),
        ("data.image_size=7 is not possible.", "Give data.image_size such a value.", [f"data.image_size={TO_FILL_IN}"]),
        ("my_model.py:3 could not be imported.", "Correct that line.", []),
        ("own_data:build returned no Splits.", "Return trainkit.data.base.Splits(info=DataInfo(...), train=...).", []),
        ("The ranks differ.", "Give data.name=NAME on every node.", [f"data.name={TO_FILL_IN}"]),
    ],
)
def test_the_change_that_an_error_asks_for_is_read_from_its_words(what: str, fix: str, changes: list[str]) -> None:
    assert settings_of(what, fix) == changes


@pytest.mark.parametrize("key", ["model.freeze", "train.global_batch_size", "optim.lr", "train.class_weights"])
def test_what_only_the_user_knows_is_refused_as_it_stands(key: str) -> None:
    with pytest.raises(UserError):
        load("single", [f"{key}={TO_FILL_IN}"])
