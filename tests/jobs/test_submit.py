import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.conftest import NO_ANSWER, Command
from tests.runs import last_event, script, wait_until
from trainkit.common.jsonl import append_jsonl
from trainkit.config.sweep import sweep_points
from trainkit.run.events import append_event
from trainkit.run.find import next_path
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

pytestmark = pytest.mark.usefixtures("no_slurm")

FAST = ("train.epochs=2", "schedule.warmup_epochs=0", "monitor.loggers=[jsonl]")
Files = Callable[[], list[Path]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Everything that lies in the test's folder now."""
    return lambda: sorted(path for path in tmp_path.rglob("*") if not path.name.endswith(".calls"))


def test_a_dry_run_prints_the_script_that_is_submitted_and_writes_nothing(
    command: Command, fake_slurm: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("ddp", "--nodes", "2", "--gpus-per-node", "2", "--account", "thesis", "optim.lr=1e-4")
    before = files()
    dry = command("submit", *arguments, "--dry-run")
    assert (dry.code, files()) == (0, before)
    assert re.search("#SBATCH --account .*flag --account", dry.err)
    command("submit", *arguments).ok()
    assert (tmp_path / "runs" / "ddp-0001" / "submit.sbatch").read_bytes() == dry.out.encode()
    assert (fake_slurm / "submitted.sbatch").read_bytes() == dry.out.encode()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, command("submit", *arguments, "--dry-run").err.partition("Note:")[0].splitlines())) <= 80


def test_a_submission_says_job_id_folder_and_what_to_type_next(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    """In words that can be typed, whatever the folder's name; its data is found from anywhere."""
    done = command("submit", "ddp", "--nodes", "2", "data.root=my/data", "--run-dir", "my runs/ddp-0001").ok()
    run = tmp_path / "my runs" / "ddp-0001"
    assert "Submitted job 4711" in done.out
    commands = [shlex.split(line.partition("python ")[2]) for line in done.out.splitlines() if "-m jobs." in line]
    typed = [(words[1], str(run) in words) for words in commands]
    assert typed == [("jobs.logs", True), ("jobs.status", True), ("jobs.cancel", True)]
    written = {"config.yaml", "plan.json", "submit.sbatch", "manifest.json", "code", "logs"}
    assert written <= {path.name for path in run.iterdir()}
    assert (last_event(RunDir(run), "submitted") or {})["executor"] == "slurm"
    assert json.loads((run / "manifest.json").read_text())["command"][3:6] == ["ddp", "--nodes", "2"]
    assert f"root: {tmp_path}/my/data" in (run / "config.yaml").read_text()


def test_a_run_that_sbatch_refuses_leaves_nothing_behind(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    """A refused account or QOS is answered with the list of one's own."""
    words = "Batch job submission failed: Invalid qos specification"
    script(fake_slurm / "sbatch", f"echo 'sbatch: error: {words}' >&2; exit 1")
    command("submit", "ddp", "--account", "thesis").refused(4, words, "jobs.cluster show")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_followed_job_says_what_it_waits_for_and_how_it_ended(
    command: Command, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.cluster.job_states.EVERY_SECONDS", 0.5)
    states = "echo x >> $0.n; if [ $(wc -l < $0.n) -lt 3 ]; then echo '4711|PENDING|Priority|0:00|'; "
    script(fake_slurm / "squeue", states + "else echo '4711|FAILED|NonZeroExitCode|0:01|n1'; fi")
    done = command("submit", "ddp", "--follow").refused(1, "ddp-0001: FAILED", "NonZeroExitCode")
    assert done.out.count("Job 4711: PENDING (Priority)") == 1


def test_submissions_at_the_same_time_get_folders_of_their_own(
    command: Command, fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [tmp_path / "runs" / "ddp-0001"]
    taken[0].mkdir(parents=True)
    (taken[0] / "config.yaml").write_text("seed: 0\n")
    # As if the other folder had been made between the look and the deed.
    monkeypatch.setattr(
        "trainkit.launch.preparation.next_path", lambda root, name: taken.pop() if taken else next_path(root, name)
    )
    command("submit", "ddp").ok(f"run folder  {tmp_path}/runs/ddp-0002")
    assert f"TRAINKIT_RUN_DIR={tmp_path}/runs/ddp-0002\n" in (fake_slurm / "submitted.sbatch").read_text()
    assert (tmp_path / "runs" / "ddp-0001" / "config.yaml").read_text() == "seed: 0\n"


def test_a_run_that_may_have_a_job_is_kept_when_interrupted(
    command: Command, fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.cluster.slurm_submission.SEARCH_PAUSES", (0.0,))
    script(fake_slurm / "sbatch", "echo 'welcome to our site'")
    done = command("submit", "ddp", "--run-dir", "runs/ddp-0001").refused(4)
    assert re.search("It is unknown whether.*\n.*welcome to our site", done.err)
    (submitted,) = (tmp_path / "runs" / "ddp-0001" / ".submitit").glob("*.sbatch")
    told = f"case \"$*\" in *%o*) echo '4711|{submitted}' ;; *) echo '4711|PENDING|Resources|0:00|' ;; esac"
    script(fake_slurm / "squeue", told)
    assert command("status", "ddp-0001").out.splitlines()[1].split()[1:3] == ["PENDING", "4711"]


# The same run


@pytest.mark.nightly
def test_the_same_run_is_not_queued_twice_unless_asked(
    command: Command, files: Files, fake_slurm: Path, tmp_path: Path
) -> None:
    """How often SLURM is asked for it is seen in tests/slurm/test_queries.py."""
    command("submit", "ddp", "--nodes", "2").ok()
    script(fake_slurm / "sbatch", "exit 1")
    before = files()
    done = command("submit", "ddp", "--nodes", "2", "--time", "10:00")
    assert (done.code, done.err, files()) == (0, "", before)
    assert "ddp-0001 is the same run, and it is PENDING (job 4711)" in done.out
    assert f"cancel      python -m jobs.cancel {tmp_path}/runs/ddp-0001" in done.out
    assert "--again" in done.out
    script(fake_slurm / "sbatch", "echo 4712")
    for name_of_its_own in (["--again"], ["--job-name", "x"], ["launch.job_name=x"], ["--run-dir", "runs/mine"]):
        command("submit", "ddp", *name_of_its_own).ok("Submitted job 4712")


@pytest.mark.usefixtures("fake_slurm")
def test_a_finished_run_is_the_same_and_a_failed_one_may_be_tried_again(command: Command, tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / "runs" / f"ddp-{number:04}") for number in range(4)]
    assert command("submit", "ddp").code == 0
    append_event(runs[1], "ended", attempt=0, state="FAILED", job_id="4711")
    done = command("submit", "ddp").ok()
    why, resume = (f"`python -m jobs.{verb} {runs[1].path}`" for verb in ("why", "resume"))
    assert f"ddp-0001 is the same run, and it has ended (FAILED): {why} says why, {resume} continues it." in done.err
    append_event(runs[2], "ended", attempt=0, state="CANCELLED", job_id="4711")
    assert "ddp-0002 is the same run, and it was cancelled" in command("submit", "ddp").err
    append_event(runs[3], "ended", attempt=0, state="COMPLETED")
    append_jsonl(runs[3].metrics, {"split": "val", "step": 7, "acc1": 90.0, "loss": 0.5})
    for follow in ([], ["--follow"], ["--wait"]):
        done = command("submit", "ddp", *follow)
        assert (done.code, done.err) == (0, "")
        said = done.out.splitlines()
        assert said[0] == "ddp-0003 is up to date: it has finished with this configuration, code and data."
        assert said[1] == f"run folder       {runs[3].path}"
        assert said[-2] == "val acc1 90.00 % (best, step 7)"
        assert "--again" in done.out.splitlines()[-1]


def test_a_run_that_may_live_for_all_that_is_known_is_not_started_twice(command: Command, fake_slurm: Path) -> None:
    assert command("submit", "ddp").code == 0
    script(fake_slurm / "squeue", NO_ANSWER)
    command("submit", "ddp").refused(3, "ddp-0001 is the same run, and it is unknown whether it is still running.")


@pytest.mark.nightly
def test_the_same_command_follows_a_run_that_goes_on(command: Command, tmp_path: Path) -> None:
    submit = ("submit", "single", *FAST, "model.width=8", "--executor", "local")  # its rank takes seconds to start
    assert command(*submit, "--no-follow").code == 0
    command(*submit).ok("single-0001 is the same run, and it is ", "test acc1")
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name.startswith("single")] == ["single-0001"]


@pytest.mark.usefixtures("fake_slurm")
def test_other_code_of_ones_own_makes_another_run(command: Command, tmp_path: Path) -> None:
    for code, says in ((1, "Submitted job"), (1, "is the same run"), (2, "Submitted job")):
        (tmp_path / "my_model.py").write_text(f"def build(info):\n    return {code}\n")
        assert says in command("submit", "ddp", "model.name=my_model:build").out


@pytest.mark.usefixtures("fake_slurm")
def test_a_run_is_repeated_by_its_name_from_anywhere(command: Command) -> None:
    command("submit", "ddp", "optim.lr=3e-4", "--run-dir", "elsewhere/first")
    done = command("submit", "first", "seed=1", "--dry-run").ok()
    assert re.search(r"optim.lr +0.0003 +file \S*elsewhere/first/config.yaml", done.err)
    assert "Did you mean 'ddp'?" in command("submit", "ddpp").err


# Sweeps


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=7..7", ["7"]),
        ("seed=-1..1", ["-1", "0", "1"]),
        ("seed=0..8..3,42", ["0", "3", "6", "42"]),
        ("data.root=../a,../b", ["../a", "../b"]),
    ],
)
def test_a_range_is_its_whole_numbers_with_both_ends(text: str, values: list[str]) -> None:
    key = text.partition("=")[0]
    assert sweep_points([text]) == [[f"{key}={value}"] for value in values]


@pytest.mark.nightly
def test_of_a_sweep_only_what_is_missing_is_trained(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    assert command("submit", "ddp", "seed=3").code == 0
    sweep = ("submit", "ddp", "--sweep", "seed=2..4")
    command(*sweep).ok("Submitted job 4711 (array of 2)", "ddp-0001 is the same run, and it is PENDING")
    points = json.loads((tmp_path / "runs" / "ddp-0002" / "sweep.json").read_text())
    assert [point["overrides"] for point in points] == [["seed=2"], ["seed=4"]]
    script(fake_slurm / "squeue", 'for i in "" _0 _1; do echo "4711$i|RUNNING|None|0:10|n1"; done')
    done = command(*sweep).ok("ddp-0002/1 is the same run, and it is RUNNING (job 4711_1).")
    assert "Submitted" not in done.out
    assert f"results     python -m jobs.report {tmp_path}/runs/ddp-0002 {tmp_path}/runs/ddp-0001" in done.out
    command(*sweep, "--again").ok("Submitted job")


@pytest.mark.nightly
def test_runs_of_a_sweep_train_side_by_side_and_the_rest_after_them(command: Command, tmp_path: Path) -> None:
    sweep = ("submit", "single", "--sweep", "seed=0..2", "launch.runs_per_gpu=2", "--executor", "local", "--wait")
    command(*sweep, "train.max_steps=2", "monitor.loggers=[jsonl]").ok("2 of 3 runs side by side")
    lives = [history_of(RunDir(tmp_path / "runs" / "single-0001" / str(index))) for index in range(3)]
    assert all(life.finished for life in lives)
    jobs = [life.submission.job_id for life in lives if life.submission is not None]
    first, second, third = (job.partition("_")[0] for job in jobs)
    assert first == third != second, "each process has every second run"
    command("status", "single-0001").ok("COMPLETED")


def test_trials_are_one_array_and_more_of_them_train_only_the_new(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    sweep = ("submit", "ddp", "--sweep", "optim.lr=1e-4..1e-1:log", "--prune", "3", "--trials")
    command(*sweep, "3").ok("Submitted job 4711 (array of 3)")
    runs = tmp_path / "runs"
    assert json.loads((runs / "ddp-0001" / "prune.json").read_text()) == {"eta": 3}
    script(fake_slurm / "squeue", 'for i in _0 _1 _2; do echo "4711$i|RUNNING|None|0:10|n1"; done')
    command(*sweep, "5").ok("Submitted job 4711 (array of 2)", "ddp-0001/2 is the same run")
    points = [json.loads(file.read_text()) for file in sorted(runs.glob("*/sweep.json"))]
    rates = [point["overrides"][0] for made in points for point in made]
    assert (len(rates), len({*rates})) == (5, 5)
    command("submit", "ddp", "--trials", "3").refused(2, "--trials 3 is not possible")
    command("submit", "ddp", "--prune", "3").refused(2, "Give --sweep as well")


@pytest.mark.nightly
def test_trials_of_a_sampler_know_what_chooses_and_whom_to_learn_from(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    """What they choose is in tests/launch/test_sampler.py."""
    pytest.importorskip("optuna")
    sweep = ("submit", "ddp", "--sweep", "optim.lr=1e-4..1e-1:log", "--trials")
    command(*sweep, "3", "--sampler", "tpe").ok("Submitted job 4711 (array of 3)")
    runs = tmp_path / "runs"
    told = {"sampler": "tpe", "sweep": ["optim.lr=1e-4..1e-1:log"]}
    assert json.loads((runs / "ddp-0001" / "sampler.json").read_text()) == {**told, "others": []}
    script(fake_slurm / "squeue", 'for i in _0 _1 _2; do echo "4711$i|RUNNING|None|0:10|n1"; done')
    command(*sweep, "5", "--sampler", "tpe").ok("Submitted job 4711 (array of 2)", "ddp-0001/2 is the same run")
    others = [str(runs / "ddp-0001" / str(index)) for index in range(3)]
    assert json.loads((runs / "ddp-0002" / "sampler.json").read_text()) == {**told, "others": others}
    command(*sweep, "3").ok("Submitted job 4711 (array of 3)")  # drawn: other runs, whatever those have chosen
    assert not (runs / "ddp-0003" / "sampler.json").exists()
    ends = ("submit", "ddp", "--sweep", "optim.lr=0.0..0.1", "--trials", "1", "--sampler", "tpe")
    command(*ends).refused(2, "optim.lr=0.0 is not valid")


def test_a_sweep_is_resumed_once_it_has_ended_and_only_if_the_site_takes_it(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    """tests/slurm/test_sweeps.py resumes one."""
    command("submit", "ddp", "--sweep", "seed=0..2").ok()
    runs = [RunDir(tmp_path / "runs" / "ddp-0001" / str(index)) for index in range(3)]
    script(fake_slurm / "squeue", 'for i in 0 1 2; do echo "4711_$i|RUNNING|None|0:10|n1"; done')
    command("resume", "ddp-0001").refused(2, "3 runs are RUNNING")
    script(fake_slurm / "squeue", "")
    for run, state in zip(runs, ("FAILED", "COMPLETED", "FAILED"), strict=True):
        append_event(run, "ended", attempt=0, state=state)
    command("resume", "ddp-0001", "--account", "proj42", "--nodes", "99").refused(3, "99 nodes are not possible")
    assert "account: null" in runs[0].config.read_text(), "refused before anything is written"
    command("resume", "ddp-0001", "--account", "proj42").ok("Submitted job 4711 for 2 of 3 runs: 0, 2")
    assert [("account: proj42" in run.config.read_text()) for run in runs] == [True, False, True]
    assert "#SBATCH --job-name=ddp\n" in (fake_slurm / "submitted.sbatch").read_text(), "as the first array"
    assert command("status", "ddp-0001").out.count("ddp-0001/") == 3, "the links are no runs of their own"


@pytest.mark.parametrize("name", ["a%jb", "%A/run", "7%a", "x%t", "a:b"])
@pytest.mark.parametrize("verb", [("submit", "ddp"), ("launch", "ddp")])
def test_a_path_that_would_be_another_in_the_job_is_refused(
    command: Command, tmp_path: Path, verb: tuple[str, str], name: str
) -> None:
    command(*verb, "--run-dir", name).refused(2, "its path holds", "Give another --run-dir")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["50%", "a%%b", "a b,c#d", "{x}", "(a)|b>c*?[d]", "-dash", "runs/~x", "x=$HOME;&!`"]
)  # fmt: skip
def test_any_other_path_is_one(command: Command, tmp_path: Path, name: str) -> None:
    """All of these have been trained in, on SLURM 22.05 and on one machine."""
    dry = command("submit", "ddp", "--executor", "local", "--dry-run", f"--run-dir={name}").ok()
    assert f"run folder {tmp_path / name}" in dry.out


@pytest.mark.parametrize(
    "words", [("--run-dir", "~nobody-here/x"), ("data.root=~nobody-here",), ("--cluster", "~x.yaml")]
)
def test_a_home_of_nobody_is_refused(command: Command, tmp_path: Path, words: tuple[str, ...]) -> None:
    command("submit", "ddp", *words).refused(2, "an unknown user name")
    assert list(tmp_path.iterdir()) == []


# Where there is no SLURM


def test_a_job_for_slurm_does_not_train_on_a_login_node_without_sbatch(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("submit", "ddp", "--nodes", "2", "--partition", "gpu", "--account", "x")
    command(*flags).refused(3, "--partition, --account are for SLURM", "module load slurm", "--executor local")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    command("submit", "ddp").refused(3, "SLURM_CONF is for SLURM")
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # a container in a job, which SLURM has given the variable
    command("submit", "ddp", "--dry-run").ok("# local: 1 x 1")


# Refused before anything is written; test_refused.py has what any verb refuses of its words


@pytest.mark.parametrize(("name", "words"), [(b"caf\xe9/runs", "is no text in UTF-8"), (b"occupied", "TRAINKIT_RUNS")])
def test_a_runs_folder_that_cannot_be_is_refused_before_anything_is_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes, words: str
) -> None:
    """As of an archive that was made with another encoding, or with a file in its place."""
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    (tmp_path / "occupied").write_text("a file where the folder should be")
    monkeypatch.setenv("TRAINKIT_RUNS", str(tmp_path / os.fsdecode(name)))
    command("submit", "ddp").refused(2, words)
    assert list(place.iterdir()) == []


def test_a_full_disk_is_refused_before_a_folder_is_made(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.launch.validation.LEAST_MB", 10**12)
    command("submit", "ddp").refused(3, "There is no room for a run")
    assert not (tmp_path / "runs").exists()


def test_what_nodes_do_not_see_is_refused(
    command: Command, fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder in memory, the folder of the submission, the data, the environment."""
    for name in ("work/data", "laptop/data"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    profile = tmp_path / "site.yaml"
    profile.write_text(f"site: {{shared_folders: [{tmp_path}/work]}}\n")
    flags = ("--cluster", str(profile), "--run-dir", str(tmp_path / "work" / "x"))

    def refused(*words: str) -> str:
        return command("submit", "ddp", *words).refused(3).err

    assert "is on this machine alone" in refused("--run-dir", "/dev/shm/trainkit-no-such-run")
    assert not Path("/dev/shm/trainkit-no-such-run").exists()
    monkeypatch.chdir(tmp_path / "laptop")
    assert f"The folder of the submission {tmp_path}/laptop is on this machine" in refused(*flags)
    monkeypatch.chdir(tmp_path / "work")
    assert "The data's folder" in refused(*flags, f"data.root={tmp_path}/laptop/data")
    assert command("submit", "ddp", *flags, "--dry-run").code == 0
    monkeypatch.setattr("sys.prefix", "/opt/laptop/venv")
    assert "The virtual environment /opt/laptop/venv is on this machine alone." in refused(*flags)
    assert command("submit", "ddp", *flags, "launch.environment=conda:x", "--dry-run").code == 0
    assert not (fake_slurm / "submitted.sbatch").exists()


# Ranks on this machine


@pytest.mark.nightly
def test_a_rank_that_raises_is_named_with_its_traceback(command: Command, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("def build(info):\n    raise RuntimeError('my own mistake')\n")
    done = command("submit", "ddp", *FAST, "model.name=my_model:build").refused(
        1, "RuntimeError: my own mistake", "Traceback", " raised RuntimeError: my own mistake, at my_model.py:2."
    )
    run = RunDir(tmp_path / "runs" / "ddp-0001")
    assert run.attempts() == [0], "it would fail again"
    # And not `jobs.resume`: the run has a copy of the code as it was.
    assert f"fix: Mend my_model.py:2: `python -m jobs.submit {run.path}`" in done.err


@pytest.mark.nightly
def test_a_rank_that_refuses_its_settings_is_quoted_everywhere(command: Command, tmp_path: Path) -> None:
    done = command("submit", "single", *FAST, "model.freeze=[nothing]")
    run = tmp_path / "runs" / "single-0001"
    what = "model.freeze: no parameter matches 'nothing'."
    why = "Its parameters have names like 0.weight, 1.weight, 1.bias."
    fix = 'Use shell wildcards over whole names, for example model.freeze=["blocks.[0-5].*"]. '
    fix += f"`python -m jobs.submit {run} model.freeze=...`"
    assert done.code == 2  # it is the user's setting that is wrong, found late
    assert done.err.splitlines() == [f"single-0001: FAILED. {what}", f"  why: {why}", f"  fix: {fix}"]
    assert command("why", "single-0001").out.splitlines()[1:] == [f"  why: {why}", f"  fix: {fix}"]
    shown = [f"cause   {what}", f"why     {why}", f"fix     {fix}"]
    assert [line for line in command("status", "single-0001").out.splitlines() if line in shown] == shown
    logs = command("logs", "single-0001").out.splitlines()
    assert logs[:3] == [f"--- single-0001: FAILED. {what}", f"--- why: {why}", f"--- fix: {fix}"]


@pytest.mark.nightly
def test_debug_runs_in_this_very_process_so_that_breakpoints_work(no_slurm: dict[str, str], tmp_path: Path) -> None:
    build = "def build(info): breakpoint(); return ours(info, width=8)\n"
    (tmp_path / "my_model.py").write_text(f"from trainkit.models.fashion_cnn import build as ours\n{build}")
    command = [sys.executable, "-m", "jobs.submit", "ddp", "--nodes", "2", "--executor", "debug", *FAST]
    done = subprocess.run(
        [*command, "model.name=my_model:build"], input="p 'stopped ' + 'here'\nc\n", env=no_slurm, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = ("stopped here", "rank 0 of 1 in this process", "not 2 nodes", "val acc1")
    assert [words for words in said if words not in done.stdout] == []


@pytest.mark.nightly
def test_interrupting_a_followed_run_leaves_it_running(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    line = [sys.executable, "-u", "-m", "jobs.submit", "single", "train.epochs=500", "monitor.loggers=[jsonl]"]
    # As from a terminal, also where the tests themselves run in the background, which ignores interrupts.
    with subprocess.Popen(
        line, env=no_slurm, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as submit:  # fmt: skip
        assert submit.stdout is not None
        while "Attempt 0" not in (line_of_it := submit.stdout.readline()):
            assert line_of_it, "it ended before it started"
        submit.send_signal(signal.SIGINT)
        rest = submit.stdout.read()
        assert submit.wait() == 130
    assert "Detached; the run goes on." in rest
    run = RunDir(tmp_path / "runs" / "single-0001")
    assert last_event(run, "ended") is None
    assert command("cancel", str(run.path)).code == 0
    assert wait_until(lambda: last_event(run, "ended"))["state"] == "CANCELLED"


# A run folder is as open as its mode says, and not as the umask of whoever starts or reports on it

ALL = (
    *("monitor.loggers=[console,jsonl,tensorboard,wandb]", "monitor.profile_steps=[2,4]"),
    *("train.epochs=1", "model.width=8"),
)


def wrong_modes(run: Path, mode: int) -> list[str]:
    """Everything in a run folder that is more or less open than the folder is to be."""
    found = [(path, stat.S_IMODE(path.stat().st_mode)) for path in (run, *run.rglob("*")) if not path.is_symlink()]
    return [f"{is_:o} {path}" for path, is_ in found if is_ != (mode if path.is_dir() else mode & 0o666)]


MODES = [(umask, mode) for umask in (0o000, 0o002, 0o077) for mode in ("700", "750", "2770")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("umask", "mode"), [pytest.param(*both, marks=() if both == (0o000, "750") else pytest.mark.long) for both in MODES]
)
def test_all_of_a_finished_run_is_as_open_as_its_mode_says(umask: int, mode: str, tmp_path: Path) -> None:
    own = {"TRAINKIT_RUN_MODE": mode, "XDG_STATE_HOME": str(tmp_path / "state"), "WANDB_MODE": "offline"}
    for words in (
        ["submit", "single", "--executor", "local", "--wait", "--run-dir", "runs/one", *ALL],
        ["evaluate", "runs/one"],
        ["report", "runs/one"],
    ):
        command, env = [sys.executable, "-m", "jobs", *words], {**os.environ, **own}
        done = subprocess.run(command, cwd=tmp_path, env=env, umask=umask, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "one"
    there = {path.name for path in run.iterdir()}
    assert there >= {"tensorboard", "wandb", "profile", "checkpoints", "logbook.md", "report.html", ".submitit", "code"}
    assert wrong_modes(run, int(mode, 8)) == []
    assert (tmp_path / "runs").stat().st_mode & 0o022 == 0, "who can write there replaces the run"
