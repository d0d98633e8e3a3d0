"""Answers to programs, by a program that knows nothing but docs/reference/json.md."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import trainkit
from tests.bench.test_results import records
from tests.jobs.conftest import PROJECT, Command, Done, make_run
from tests.report.conftest import write_run, write_sweep_of
from trainkit.bench.base import CONTROL, BenchRequest
from trainkit.common.jsonl import append_jsonl
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import append_event
from trainkit.run.folder import BenchDir, RunDir
from trainkit.swarm.protocol.addresses import EXAMPLE

PAGE = PROJECT / "docs" / "reference" / "json.md"


def shape_of(name: str) -> tuple[str, Draft202012Validator]:
    """How many objects the page says that there are, and their schema."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n## {name}\n")
    section = rest.partition("\n## ")[0]
    schema = re.search(r"```json\n(.+)\n```", section)
    assert schema, f"the page has no {name}"
    count = re.search(r"(One object|A list of objects|Objects, one a line)\.", section)
    assert count
    of_it = json.loads(schema[1])
    assert list(undefined(of_it)) == [], f"the page does not say what {name} holds"
    return count[1], Draft202012Validator(of_it)


def undefined(part: Any) -> Iterator[str]:
    """Keys of a schema under which anything may be."""
    if not isinstance(part, dict):
        return
    for key in ("$defs", "properties"):
        for name, of_it in part.get(key, {}).items():
            if not of_it.keys() & {"type", "anyOf", "$ref", "const", "enum"}:
                yield name
            yield from undefined(of_it)
    if part.get("type") == "object" and "properties" not in part and not isinstance(part["additionalProperties"], dict):
        yield str(part)
    for of_it in [*part.get("anyOf", []), part.get("items"), part.get("additionalProperties")]:
        yield from undefined(of_it)


def answer(done: Done, name: str) -> Any:
    """The answer of a command, which must be as the page says, and alone on stdout."""
    count, schema = shape_of(name)
    if count == "Objects, one a line":
        told = [json.loads(line) for line in done.out.splitlines()]
    else:
        told = json.loads(done.out)
    assert isinstance(told, dict) == (count == "One object")
    for item in [told] if isinstance(told, dict) else told:
        assert [error.message for error in schema.iter_errors(item)] == []
        assert item["version"] == 1
    return told


@pytest.fixture
def failed(tmp_path: Path, command: Command) -> RunDir:
    run = make_run(tmp_path / "runs" / "ddp-0001")
    append_event(run, "submitted", executor="local", job_id="1")
    run.attempt_logs(0).mkdir()
    (run.attempt_logs(0) / "rank-0.out").write_text("one\ntwo\n")
    words = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: no luck\n'
    (run.attempt_logs(0) / "rank-1.out").touch()
    (run.attempt_logs(0) / "rank-1.err").write_text(words)
    append_event(run, "started", attempt=0, world_size=2, hosts=["n1", "n2"])
    append_event(run, "failed", attempt=0, rank=1, host="n2", error="ValueError: no luck")
    append_event(run, "ended", attempt=0, state="FAILED")
    return run


def test_why_names_rank_node_evidence_and_command(command: Command, failed: RunDir) -> None:
    (found,) = answer(command("why", "ddp-0001", "--json"), "why")
    assert (found["state"], found["rank"], found["node"], found["attempt"]) == ("FAILED", 1, "n2", 0)
    assert "no luck" in found["what"]
    assert found["cause"] == "exception"
    assert "ddp-0001" in found["command"]
    for item in found["evidence"]:
        if item["file"] is not None:
            assert item["text"] in Path(item["file"]).read_text().splitlines()[item["line"] - 1]
    assert any(item["file"] for item in found["evidence"])


def test_why_of_a_sweep_has_each_cause_once(command: Command, failed: RunDir, tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "sweep-0002"
    sweep.mkdir()
    for number in ("0", "1"):
        run = make_run(sweep / number)
        append_event(run, "submitted", executor="local", job_id="1")
        append_event(run, "failed", attempt=0, rank=0, host="n1", error="ValueError: the same")
        append_event(run, "ended", attempt=0, state="FAILED")
        run.attempt_logs(0).mkdir()
    (sweep / "sweep.json").write_text("[]")
    told = answer(command("why", "sweep-0002", "--json"), "why")
    assert [len(item["runs"]) for item in told] == [2]


def test_logs_are_lines_and_end_with_the_state(command: Command, failed: RunDir) -> None:
    *lines, end = answer(command("logs", "ddp-0001", "--rank", "all", "--json"), "logs")
    assert [(line["rank"], line["stream"], line["text"]) for line in lines] == [(0, "out", "one"), (0, "out", "two")]
    assert (end["kind"], end["state"]) == ("end", "FAILED")


def test_progress_is_records_and_events(command: Command, failed: RunDir) -> None:
    append_jsonl(failed.metrics, {"split": "train", "step": 10, "loss": float("nan"), "time": time.time()})
    append_jsonl(failed.metrics, {"split": "val", "step": 10, "acc1": 50, "attempt": "x", "why": "a", "mine": [[1]]})
    told = answer(command("logs", "ddp-0001", "-f", "--json"), "logs")
    assert [item["values"]["event"] for item in told if item["kind"] == "event"][-1] == "ended"
    record, val = [item for item in told if item["kind"] == "record"]
    assert (record["values"]["step"], record["values"]["loss"]) == (10, None)
    assert (val["attempt"], val["values"]["attempt"], val["values"]["mine"]) == (None, "x", None)
    assert answer(command("status", "--json"), "status")[0]["val"] == {"step": 10, "acc1": 50}
    assert told[-1]["kind"] == "end"


def test_status_clean_and_report_tell_what_they_tell_people(command: Command, failed: RunDir, tmp_path: Path) -> None:
    (row,) = answer(command("status", "--json"), "status")
    assert row["state"] == "FAILED"
    done = answer(command("clean", "ddp-0001", "--json"), "clean")
    assert (done["removed"], done["runs"][0]["goes"]) == (False, [str(failed.path)])
    sweep = tmp_path / "runs" / "sweep-0003"
    for number, speed in (("0", 2000.0), ("1", 1000.0)):
        write_run(sweep / number, speed=speed)
    write_sweep_of(sweep, ["optim.lr=1"], ["optim.lr=2"])
    told = answer(command("report", "sweep-0003", "--out", "there", "--json"), "report")
    assert {run["point"]["optim.lr"] for run in told["runs"]} == {"1", "2"}
    assert told["runs"][0]["best"] == pytest.approx(98.7, abs=0.1)
    assert str(tmp_path / "there" / "logbook.md") in [str(Path(file).absolute()) for file in told["files"]]
    gone = answer(command("clean", "ddp-0001", "--yes", "--json"), "clean")
    assert gone["removed"]
    assert not failed.path.exists()
    assert all(Path(heap).is_dir() for heap in gone["trash"])


def test_submission_plan_and_resumption_are_answered(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    asked = ("--nodes", "2", "launch.requeue=true", "launch.sbatch.comment=a", "launch.setup=[a]")
    plan = answer(command("submit", "ddp", *asked, "--dry-run", "--json"), "dry-run")
    assert (plan["nodes"], plan["executor"]) == (2, "slurm")
    assert plan["script"].startswith("#!/bin/bash")
    assert {"name": "nodes", "value": 2, "source": "flag --nodes", "reason": ""} in plan["directives"]
    told = answer(command("submit", "ddp", "--run-dir", "runs/first", "--json"), "submit")
    assert [(run["job_id"], run["state"], run["goes_on"]) for run in told["runs"]] == [("4711", "PENDING", True)]
    assert told["runs"][0]["folder"] == str(tmp_path / "runs" / "first")
    (tmp_path / "mine.yaml").write_text("launch: {partition: main, setup: [a, b], sbatch: {comment: c}}\n")
    known = answer(command("cluster", "show", "mine.yaml", "--json"), "cluster show")["settings"]
    assert known == {"launch.partition": "main", "launch.setup": ["a", "b"], "launch.sbatch": {"comment": "c"}}
    site = answer(command("cluster", "show", "--json"), "cluster show")
    assert [part["name"] for part in site["site"]["partitions"]] == ["main"]


def test_a_question_of_time_does_not_ask_the_site_twice(command: Command, fake_slurm: Path) -> None:
    asked = fake_slurm / "asked"
    scontrol = fake_slurm / "scontrol"
    scontrol.write_text(scontrol.read_text().replace("if [", f'echo "$*" >> {asked}; if [', 1))
    for more in ((), ("--dry-run",)):
        asked.unlink(missing_ok=True)
        command("submit", "ddp", "--by", "8h", *more, "--json").ok()
        lines = asked.read_text().splitlines()
        assert len(lines) == len(set(lines)), lines


def test_figures_of_a_bench_are_answered_without_torn_samples(command: Command, tmp_path: Path) -> None:
    run = BenchDir(tmp_path / "runs" / "bench-0001")
    run.path.mkdir(parents=True)
    run.config.write_text("{}")
    run.request.write_text(BenchRequest("amp", "ddp").to_json())
    for record in [*records({"fp32": [1.0] * 5, "bf16": [0.5] * 5, CONTROL: [1.0] * 5}), {"kind": "sample"}]:
        append_jsonl(run.samples, record)
    for verb in ("report", "bench --show"):
        told = answer(command(*verb.split(), "bench-0001", "--json"), "bench")
        assert [(arm["name"], arm["ratio"]) for arm in told["arms"]] == [("fp32", None), ("bf16", 2.0)]
        assert len(told["samples"]) == 15


@pytest.mark.swarm
def test_a_swarm_that_has_ended_is_answered_from_its_records(command: Command, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "hivemind-0001", to_yaml(load("hivemind").config))
    (run.path / "swarm_address").write_text(EXAMPLE + "\n", encoding="utf-8")
    append_jsonl(run.metrics, {"time": 1.0, "step": 10, "round": 1, "split": "val", "loss": 1.25, "acc1": 61.5})
    told = answer(command("swarm", "status", "hivemind-0001", "--json"), "swarm status")
    assert (told["running"], told["val"]) == (False, {"loss": 1.25, "acc1": 61.5})


@pytest.mark.nightly
def test_a_check_of_this_machine_is_answered(command: Command) -> None:
    told = answer(
        command("cluster", "check", "--executor", "local", "--ntasks-per-node", "2", "--json"), "cluster check"
    )
    assert told["ranks"].keys() == told["found"].keys() == {"0", "1"}
    assert told["found"]["0"]["inside"]["gb_s"] > 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("why nosuch --json", 2),
        ("submit ddp optim.lrr=1 --json", 2),
        ("status --bogus --json", 2),
        ("resume nosuch --json", 2),
        ("cluster show --json", 3),
        ("swarm doctor /nosuch --json", 2),
        ("bench --show nosuch --json", 2),
        ("clean nosuch --json", 2),
        ("logs nosuch -f --json", 2),
        ("report nosuch --json", 2),
    ],
)
def test_an_error_is_an_answer(command: Command, words: str, code: int) -> None:
    done = command(*words.split())
    error = answer(done, "error")["error"]
    assert (done.code, error["exit_code"]) == (code, code)
    assert error["what"]
    assert error["why"]
    assert error["fix"]
    assert done.err == ""


def test_json_behind_dashes_is_the_scripts_own(command: Command, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    said = command("submit", "train.py", "--executor", "local", "--dry-run", "--", "--json")
    with pytest.raises(json.JSONDecodeError):
        json.loads(said.ok().out)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.nightly
def test_a_run_in_python_has_the_same_facts(command: Command, tmp_path: Path) -> None:
    """Of a sweep of two runs, whose plan is compared as well, and of a script that fails."""
    (tmp_path / "broken.py").write_text("print(1 / 0)\n")
    command("submit", "broken.py", "--executor", "local", "--run-dir", "runs/broken", "--wait")
    asked = ("single", "train.max_steps=20", "--executor", "local", "--run-dir", "runs/swept")
    command("submit", *asked, "--sweep", "optim.lr=1e-3,3e-3", "--wait").ok()
    (finding,) = answer(command("why", "broken", "--json"), "why")
    assert (finding["rank"], finding["command"] is not None, bool(finding["evidence"])) == (0, True, True)
    assert plain({"version": 1, **trainkit.open("broken").why()}) == finding
    for words, names in (("swept", ("0", "1")), ("broken", ("broken",)), ("swept/0", ("0",))):
        told = answer(command("report", f"runs/{words}", "--out", "there", "--json"), "report")["runs"]
        assert {Path(each["folder"]).name for each in told} == set(names)
        for each in told:
            run = trainkit.open(each["folder"])
            cost = plain(run.cost)
            assert cost == {key: each[key] for key in cost}
            assert (each["finished"], run.status) in ((True, "COMPLETED"), (False, "FAILED"))
            assert cost["wall_seconds"] > 0
            (found,) = answer(command("why", each["folder"], "--json"), "why")
            assert plain({"version": 1, **run.why()}) == found
    planned = answer(command("submit", *asked[:-1], "runs/other", "--dry-run", "--json"), "dry-run")
    plan = plain(trainkit.open("runs/swept/0").plan)
    same = plan.keys() & planned.keys() - {"decisions", "directives", "folder"}
    assert {key: plan[key] for key in same} == {key: planned[key] for key in same}
    assert len(same) >= 6
    for key in ("decisions", "directives"):
        assert plan[key] == planned[key]
