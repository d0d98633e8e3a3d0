from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.conftest import rows_of, write_sweep_of
from trainkit import fileio
from trainkit.config.task import LOSS
from trainkit.errors import UserError
from trainkit.report import figures, sections
from trainkit.report.document import Items
from trainkit.report.facts import Facts, collect
from trainkit.report.write_html import write_page
from trainkit.report.write_markdown import write_comparison, write_logbook, write_sweep
from trainkit.run.contributions import Contributions, Counted
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Metric, TaskMetrics, describe

MakeRun = Callable[..., RunDir]


def written(runs: list[RunDir], out: Path) -> str:
    paths = write_logbook(collect(runs), out)
    assert all(path.is_file() for path in paths)
    return paths[0].read_text(encoding="utf-8")


def pictures(text: str) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)


def test_the_log_book_of_one_run_lies_beside_its_charts(make_run: MakeRun, tmp_path: Path) -> None:
    text = written([make_run()], tmp_path / "out")
    assert "# Log book: ddp-0001" in text
    assert pictures(text) == [f"ddp-0001-{name}.svg" for name in ("curves", "timeline", "hardware")]
    for name in pictures(text):
        assert ElementTree.parse(tmp_path / "out" / name).getroot().tag.endswith("svg")


def test_it_has_settings_results_and_costs(make_run: MakeRun, tmp_path: Path) -> None:
    text = written([make_run(gpus=1)], tmp_path / "out")
    for line in (
        "| strategy | ddp |",
        "| test, best checkpoint | 400 | 20.0 | 0.0600 | 98.90 % | 100.00 % |",
        "| training time | 12.8 s |",
        "| throughput, median | 2,010 images/s |",
        "| peak memory of rank 0 | 812 MB (of its process, on the CPU) |",
        "| GPU 0 of node1 | 90 % | 90 % | 8.8 GB of 16.0 GB | 65 W | – |",  # noqa: RUF001
        "| attempts | 1 (0 requeued) |",
    ):
        assert line in text
    assert "Not recorded" not in text


def test_several_runs_are_compared_with_the_first(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("single-0001", preset="single", ranks=1, speed=990.0), make_run("ddp-0002", speed=1850.0)]
    text = written(runs, tmp_path / "out")
    assert "| ddp-0002 | ddp | 2 | 400 | 98.71 % | 98.90 % | 13.8 s | 1,860 | 1.86× | 93 % | 1.87× |" in text  # noqa: RUF001
    assert "| strategy.name | single | ddp |" in text
    assert pictures(text)[:2] == ["throughput.svg", "scaling.svg"]
    assert re.findall("(?m)^## (.*)", text) == ["Comparison", "Scaling", "Curves", "single-0001", "ddp-0002"]


def test_an_interrupted_run_says_so_and_what_it_lacks(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=200, finished=False)
    fileio.append_jsonl(run_dir.events, {"time": 1.7e9, "event": "failed", "rank": 1, "error": "ValueError: `x`\nmore"})
    text = written([run_dir], tmp_path / "out")
    assert "Not finished: 200 of 400 steps. **It has failed on rank 1: ValueError: \\`x\\`.**" in text
    assert "(estimated from the records)" in text
    assert f"- test metrics: `python -m jobs.evaluate {run_dir.path}` measures them" in text


def test_a_run_without_hardware_samples_is_reported(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run()
    run_dir.hardware("node1").unlink()
    text = written([run_dir], tmp_path / "out")
    assert "- hardware samples: " in text
    assert pictures(text) == ["ddp-0001-curves.svg", "ddp-0001-timeline.svg"]


def test_torn_and_foreign_lines_do_no_harm(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run()
    for path in (run_dir.metrics, run_dir.events, run_dir.hardware("node1")):
        with path.open("a") as file:
            file.write('{"step": 1, "split": "val", "epoch": null, "acc1": null}\n[1]\n{"event": "started"}\n{"torn')
    assert "98.90 %" in written([run_dir], tmp_path / "out")


def test_a_run_that_diverged_is_reported(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=20, finished=False)
    for step in range(30, 200, 10):
        record = {"step": step, "epoch": step / 20, "loss": float("nan"), "acc1": 10.0, "images_per_sec": 2000.0}
        fileio.append_jsonl(run_dir.metrics, {**record, "split": "train", "lr": 1e-3})
        fileio.append_jsonl(run_dir.metrics, {**record, "split": "val"})
        fileio.append_jsonl(run_dir.events, {"event": "nonfinite", "step": step})
    text = written([run_dir], tmp_path / "out")
    assert "190 of 400 steps. **It has diverged: loss nan from step 30, 17 of 190 updates skipped.**" in text


def test_runs_of_one_name_do_not_overwrite_each_others_plots(make_run: MakeRun, tmp_path: Path) -> None:
    text = written([make_run("a/ddp-0001"), make_run("b/ddp-0001")], tmp_path / "out")
    assert len(set(pictures(text))) == len(pictures(text)) == 8


def test_pictures_have_file_names_that_every_file_system_takes(make_run: MakeRun, tmp_path: Path) -> None:
    run, labels = make_run(steps=10), ("x" * 400 + "1", "x" * 400 + "2", "\N{CJK UNIFIED IDEOGRAPH-65E5}", "../-rf")
    text = write_logbook([Facts(run, label) for label in labels], tmp_path / "out")[0].read_text()
    names = [name for name in pictures(text) if name.endswith("-curves.svg")]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,120}", name) for name in names)


def test_of_very_many_runs_those_named_first_have_pictures(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.report.write_markdown.MOST_DRAWN", 1)
    first, second, third = make_run("a", steps=10), make_run("b", steps=10), make_run("c", "seed=1", steps=10)
    text = written([first, second, third], tmp_path / "out")
    assert not [name for name in pictures(text) if name.startswith(("b-", "c-"))]
    assert text.count("### Cost") == 3, "their text is there"
    assert f"of the first 1; every other has its own by `python -m jobs.report {second.path}`." in text
    assert [name for name in pictures(text) if name.startswith("a-")]


def test_a_log_book_that_somebody_wrote_is_never_replaced(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "logbook.md").write_text("# Mine\n")
    with pytest.raises(UserError, match="was not written by this command"):
        write_logbook(collect([make_run()]), tmp_path)
    assert (tmp_path / "logbook.md").read_text() == "# Mine\n"


def test_a_run_that_never_began_is_an_error(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=0, finished=False)
    run_dir.events.unlink()
    with pytest.raises(UserError, match=r"Nothing to report on in ddp-0001\."):
        write_logbook(collect([run_dir]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_failed_before_its_first_record_is_reported(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=0, finished=False)
    for _ in range(3):
        fileio.append_jsonl(run_dir.events, {"event": "nonfinite", "step": 0, "loss": "nan"})
    fileio.append_jsonl(
        run_dir.events, {"time": 1.7e9, "event": "failed", "rank": 0, "error": "Training has diverged."}
    )
    text = written([run_dir], tmp_path / "out")
    assert "0 of 400 steps. **It has failed on rank 0: Training has diverged. It has diverged: 3 of" in text
    assert "- training metrics: metrics.jsonl has none" in text


def test_a_folder_that_cannot_be_made_is_an_error(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*logbook\.md"):
        write_logbook(collect([make_run()]), tmp_path / "file" / "out")


def test_the_gpus_are_in_the_log_book_as_nvidia_smi_shows_them(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run("ddp-0001")
    (run_dir.path / "nvidia-smi-node1.txt").write_text("driver 550.54\nGPU 0  NVIDIA T4\n``` \x1b[31mred\n")
    text = write_logbook(collect([run_dir]), tmp_path / "out")[0].read_text()
    assert "GPUs of node1, as nvidia-smi has them:\n\n```\ndriver 550.54\nGPU 0 NVIDIA T4\n''' red\n```" in text


def test_a_collaborative_run_names_who_has_contributed_how_much(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run("hivemind-0001", preset="hivemind")
    assert "who contributed" not in written([run_dir], tmp_path / "before")
    ledger = Contributions()
    link = Counted("<b>![](http://x)", 500)  # as anybody may call itself in an open run
    ledger.add(3600.0, [Counted("anna", 3000, 4_510_000), Counted("b|o", 1000), link])
    ledger.write(run_dir)
    text = written([run_dir], tmp_path / "out")
    assert "| anna | 3,000 | 66.7 % | 1 | 1.00 | 4.5 MB |" in text
    assert "| b\\|o | 1,000 | 22.2 % | 1 | 1.00 | – |" in text  # noqa: RUF001
    assert r"| \<b>![\](http://x) |" in text


def test_a_collaborative_run_tells_its_rounds_and_what_was_sent(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run("hivemind-0001", preset="hivemind")
    for index, peers in enumerate((1, 3, 2)):
        told = {"split": "train", "step": 100 + index, "epoch": 1.0, "loss": 1.0, "round": index + 1, "peers": peers}
        sent = {"parts": 2 * (peers - 1), "parts_expected": 4, "bytes_up": 2_000_000, "bytes_down": 500_000}
        fileio.append_jsonl(run_dir.metrics, {"time": 1.8e9 + index, **told, **sent})
    text = written([run_dir], tmp_path / "out")
    assert "| rounds | 3 of 15 |" in text
    assert "| averaged with others | 2, by up to 3 peers |" in text
    assert "| parts received | 50.0 % |" in text
    assert "| sent | 6.0 MB |\n| received | 1.5 MB |" in text
    assert "Where the time went" not in text


def test_it_says_what_was_asked_and_where_it_ran(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run("ddp-0001", "optim.lr=0.01", "seed=3")
    command = ["python", "-m", "jobs.submit", "ddp", "--nodes", "2", "optim.lr=1e-2", "seed=3", "train.epochs=20"]
    about = {"command": command, "host": "login1", "python": "3.11.7", "packages": {"torch": "2.6.0"}}
    run_dir.manifest.write_text(json.dumps(about))
    text = written([run_dir], tmp_path / "out")
    for line in (
        "python -m jobs.submit ddp --nodes 2 optim.lr=1e-2 seed=3 train.epochs=20",
        "| optim.lr | 0.01 | 0.002 |",
        "| seed | 3 | 0 |",
        "| train.epochs | 20 | 20 |",
        "| GPUs | none: trained on the CPU |",
        "| software | Python 3.11.7, torch 2.6.0 |",
        "| submitted from | login1 |",
    ):
        assert line in text
    assert "| optim.weight_decay |" not in text


def test_every_attempt_has_a_row_that_says_how_it_ended(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=0, finished=False)
    run_dir.events.unlink()
    for time, kind, fields in (
        (100.0, "started", {"attempt": 0, "step": 0, "world_size": 4, "hosts": ["n1", "n2"], "device": "NVIDIA T4"}),
        (160.0, "handed_back", {"attempt": 0, "step": 30, "signals": ["SIGUSR2"]}),
        (161.0, "requeued", {"attempt": 0}),
        (200.0, "started", {"attempt": 1, "step": 30, "world_size": 2, "hosts": ["n2"], "device": "NVIDIA T4"}),
        (210.0, "failed", {"attempt": 1, "rank": 1, "error": "NCCL error"}),
        (211.0, "ended", {"attempt": 1, "state": "FAILED"}),
        (300.0, "started", {"attempt": 2, "step": 30, "world_size": 4, "hosts": ["n1", "n2"], "device": "NVIDIA T4"}),
    ):
        fileio.append_jsonl(run_dir.events, {"time": time, "event": kind, **fields})
    fileio.append_jsonl(run_dir.metrics, {"time": 349.0, "step": 50, "epoch": 2.5, "split": "train", "loss": 1.0})
    rows = rows_of(figures.attempts(Facts(run_dir, "r")))
    assert [(row[0], *row[2:]) for row in rows] == [
        ("0", "n1, n2", "4", "0 to 30", "1 min 01 s", "told to stop (SIGUSR2), saved, requeued"),
        ("1", "n2", "2", "30 to 30", "11.0 s", "failed on rank 1: NCCL error"),
        ("2", "n1, n2", "4", "30 to 50", "49.0 s", "killed without a word, or goes on"),
    ]
    costs = {row[0]: row[1] for row in rows_of(sections.cost(Facts(run_dir, "r")))}
    assert costs["GPU-hours"] == "0.128", "(61 s x 4 + 11 s x 2 + 49 s x 4) / 3600"


def test_the_runs_of_a_sweep_are_named_by_what_was_swept(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"ddp-0001/{index}", f"optim.lr={lr}") for index, lr in enumerate(("1e-3", "3e-3"))]
    write_sweep_of(runs[0].path.parent, ("optim.lr=1e-3", "seed=0"), ("optim.lr=3e-3", "seed=0"))
    fileio.append_jsonl(runs[1].metrics, {"step": 400, "epoch": 20.0, "split": "val", "loss": 0.01, "acc1": 99.9})
    text = write_sweep(runs[0].path.parent, collect(runs), tmp_path / "out")[0].read_text()
    assert re.findall("(?m)^## (.*)", text) == ["Results", "Curves", "lr=3e-3", "lr=1e-3"], "the best first"
    assert "2 of 2 runs have finished." in text
    assert len(set(pictures(text))) == len(pictures(text)) == 8


def test_a_comparison_says_what_does_not_compare(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("ddp-0001"), make_run("ddp-0002", "model.name=resnet18"), make_run("ddp-0003", steps=200)]
    table, paths = write_comparison(collect(runs), tmp_path / "out")
    text = paths[0].read_text()
    assert "- ddp-0002 is not compared in speed, time and memory: model.name resnet18 and not fashion_cnn." in text
    assert "- ddp-0003 has no time ratio: it saw 12,800 images and not 25,600." in text
    assert table.splitlines()[2] in text
    assert "## Settings that differ" in text
    assert "Cost" not in text, "the comparison alone"


def test_no_sentence_of_a_comparison_is_markup(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(), make_run("[a](http", "model.name=resnet18")]
    runs[1].config.write_text("model: {name: '<img src=x> [a](http://b)'}\n")
    text = written(runs, tmp_path / "out")
    assert "model.name \\<img src=x> [a\\](http://b) and not fashion_cnn" in text
    assert not re.search(r"(?<!\\)<img|(?<!\\)\]\(http", re.sub("`[^`]*`", "", text))


def test_a_run_whose_checkpoints_are_in_a_bucket_says_where(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert "bucket" not in written([run], tmp_path / "before")
    (run.path / "remote.json").write_text('{"url": "s3://mine/vit/ddp-0001", "id": "7"}')
    assert "- in the bucket: `s3://mine/vit/ddp-0001`, with the best weights\n" in written([run], tmp_path / "after")


def test_a_pipe_in_the_place_of_the_record_is_no_record_and_is_not_waited_for(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run_dir = make_run(steps=0, finished=False)
    os.mkfifo(run_dir.metrics)
    with pytest.raises(UserError, match="Cannot read"):
        write_logbook(collect([run_dir]), tmp_path / "out")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_run_of_somebody_else_is_reported_without_what_is_closed_in_it(make_run: MakeRun) -> None:
    with tempfile.TemporaryDirectory() as shared:
        run = RunDir(Path(shutil.copytree(make_run().path, Path(shared, "ddp-0001"))))
        run.checkpoints.mkdir(mode=0o700, exist_ok=True)
        (Path(shared) / "store").mkdir(mode=0o700)
        run.code.symlink_to(Path(shared) / "store" / "code")
        (facts,) = collect([run])
        for path in (Path(shared), run.path):
            path.chmod(0o755)
        os.seteuid(65534)
        try:
            (items,) = sections.places(facts)
        finally:
            os.seteuid(0)
    assert isinstance(items, Items)
    listed = [word for line in items.lines for word in line]
    assert str(run.path) in listed
    assert not {str(run.code), str(run.checkpoints)} & set(listed)


def test_page_and_log_book_have_the_same_sections(make_run: MakeRun, tmp_path: Path) -> None:
    runs = collect([make_run(gpus=1), make_run("ddp-0002", ranks=4, speed=3900.0)])
    (runs[0].run_dir.path / "nvidia-smi-node1.txt").write_text("driver 550.54")
    for number in (1, 2):
        book = write_logbook(runs[:number], tmp_path)[0].read_text()
        page = write_page(runs[:number], tmp_path).read_text()
        in_book = re.findall(f"(?m)^##{'#?' * (number - 1)} (.*)", book)
        assert {title for title in in_book if not title.startswith("ddp")} - {"Settings that differ"} == set(
            re.findall('<h2 id="[a-z]+-title">([^<]*)', page)
        )


def test_a_task_is_told_by_its_own_metrics(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"s/{number}", f"optim.lr={number + 1}e-3", steps=0, finished=False) for number in range(2)]
    write_sweep_of(runs[0].path.parent, ("optim.lr=1e-3",), ("optim.lr=2e-3",))
    for run, best in zip(runs, (2.0, 1.5), strict=True):
        mean_error = Metric("px", higher_is_better=False, label="Mean error")
        describe(run, TaskMetrics("mae", {"loss": LOSS, "mae": mean_error}))
        for step, error in ((20, 3.0), (40, best), (60, 2.5)):
            record = {"step": step, "epoch": step / 10, "loss": error, "mae": error}
            fileio.append_jsonl(run.metrics, {**record, "split": "val"})
    book = write_sweep(runs[0].path.parent, collect(runs), tmp_path)[0].read_text()
    page = write_page(collect(runs), tmp_path).read_text()
    assert "Best by validation: lr=2e-3, val mae 1.5000 px." in book
    assert book.index("lr=2e-3\n") < book.index("lr=1e-3\n"), "the smaller error first"
    assert "| val, best checkpoint | 40 | 4.0 | 1.5000 | 1.5000 px |" in book
    assert "Mean error <" in page
    assert "images that were told wrong" not in book
    assert not [text for text in (book, page) if "acc1" in text or "accuracy" in text.lower()]
