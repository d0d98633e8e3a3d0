"""What log book and page hold, and that nothing of a run gets out of its place. How the page works: `test_browser`."""

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.report.conftest import MakeRun, rows_of, write_run, write_sweep_of
from trainkit.common import jsonl
from trainkit.common.errors import UserError
from trainkit.config.task_metrics import LOSS, Metric, TaskMetrics
from trainkit.report import chart_sections, text_sections
from trainkit.report.collection import collect
from trainkit.report.document import Items
from trainkit.report.facts import Facts
from trainkit.report.writers import write_comparison, write_logbook, write_page
from trainkit.run.contributions import Contributions, Counted
from trainkit.run.folder import RunDir
from trainkit.run.metrics import describe


def written(runs: list[RunDir], out: Path) -> str:
    paths = write_logbook(collect(runs), out)
    assert all(path.is_file() for path in paths)
    return paths[0].read_text(encoding="utf-8")


def pictures(text: str) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)


def test_a_run_that_diverged_says_from_where_and_what_it_skipped(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(steps=20, finished=False)
    for step in range(30, 200, 10):
        jsonl.append_jsonl(run.metrics, {"step": step, "epoch": step / 20, "loss": float("nan"), "split": "train"})
        jsonl.append_jsonl(run.events, {"event": "nonfinite", "step": step})
    diverged = "190 of 400 steps. **It has diverged: loss nan from step 30, 17 of 190 updates skipped.**"
    assert diverged in written([run], tmp_path / "out")
    run.summary.write_text('{"outcome": "finished", "steps": 400}')
    assert re.search(r"Finished after 400 steps\.\s+It has diverged: loss nan from step 30", page_of(run).text)


def test_a_pipe_in_the_place_of_the_record_is_not_waited_for(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(steps=0, finished=False)
    os.mkfifo(run.metrics)
    with pytest.raises(UserError, match="Cannot read"):
        write_logbook(collect([run]), tmp_path / "out")


def test_the_log_book_of_one_run_lies_beside_its_charts(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("ddp-0001", "optim.lr=0.01", "seed=3", gpus=2)
    command = "python -m jobs.submit ddp --nodes 2 optim.lr=1e-2 seed=3 train.epochs=20"
    about = {"command": command.split(), "host": "login1", "python": "3.11.7", "packages": {"torch": "2.6.0"}}
    run.manifest.write_text(json.dumps(about))
    (run.path / "remote.json").write_text('{"url": "s3://mine/vit/ddp-0001", "id": "7"}')
    (run.path / "nvidia-smi-node1.txt").write_text("driver 550.54\nGPU 0  NVIDIA T4\n``` \x1b[31mred\n")
    text = written([run], tmp_path / "out")
    for line in (
        "# Log book: ddp-0001",
        command,
        "fashion_cnn, digits, ddp. Finished after 400 steps.",
        "| optim.lr | 0.01 | 0.002 |",
        "| seed | 3 | 0 |",
        "| GPUs | none: trained on the CPU |",
        "| software | Python 3.11.7, torch 2.6.0 |",
        "| submitted from | login1 |",
        "| strategy | ddp |",
        "| test, best checkpoint | 400 | 20.0 | 0.0600 | 98.90 % | 100.00 % |",
        "| training time | 12.8 s |",
        "| throughput, median | 2,010 images/s |",
        "| peak memory of rank 0 | 812 MB (of its process, on the CPU) |",
        "| GPU 0 of node1 | 90 % | 90 % | 8.8 GB of 16.0 GB | 65 W | – |",  # noqa: RUF001
        "| GPU 1 of node1 | 91 % | 91 % | 9.3 GB of 16.0 GB | 65 W | – |",  # noqa: RUF001
        "| CPUs of node1 | 85 % | 90 % |",
        "| attempts | 1 (0 requeued) |",
        "- in the bucket: `s3://mine/vit/ddp-0001`, with the best weights\n",
        "GPUs of node1, as nvidia-smi has them:\n\n````\ndriver 550.54\nGPU 0  NVIDIA T4\n``` red\n````",
    ):
        assert line in text
    assert "Not recorded" not in text
    assert "| optim.weight_decay |" not in text
    assert pictures(text) == [f"ddp-0001-{name}.svg" for name in ("curves", "timeline", "hardware")]
    for name in pictures(text):
        assert ElementTree.parse(tmp_path / "out" / name).getroot().tag.endswith("svg")


def test_several_runs_are_compared_with_the_first(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("single-0001", preset="single", ranks=1, speed=990.0), make_run("ddp-0002", speed=1850.0, gpus=1)]
    text = written(runs, tmp_path / "out")
    assert "\nddp-0002: fashion_cnn, digits, ddp. Finished after 400 steps.\n" in text
    assert "| ddp-0002 | ddp | 2 | 400 | 98.71 % | 98.90 % | 13.8 s | 1,860 | 1.86× | 93 % | 1.87× |" in text  # noqa: RUF001
    assert "| strategy.name | single | ddp |" in text
    curves = (tmp_path / "out" / "curves.svg").read_text()
    assert curves.count("line faint") == 2 * 3, "train beside val; rate and throughput are of the training alone"
    assert pictures(text) == [f"{name}.svg" for name in ("scaling", "curves", "timeline", "hardware", "hardware-2")]
    assert re.findall("(?m)^## (.*)", text)[:3] == ["Comparison", "Curves", "Results by split"]


def test_an_interrupted_run_says_so_and_what_it_lacks(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=200, finished=False)
    jsonl.append_jsonl(run_dir.events, {"time": 1.7e9, "event": "failed", "rank": 1, "error": "ValueError: `x`\nmore"})
    text = written([run_dir], tmp_path / "out")
    assert "Not finished: 200 of 400 steps. **It has failed on rank 1: ValueError: \\`x\\`.**" in text
    assert "(estimated from the records)" in text
    assert f"- test metrics: `python -m jobs.evaluate {run_dir.path}` measures them" in text
    assert "It has failed on rank 1: ValueError: `x`." in page_of(run_dir).text
    jsonl.append_jsonl(run_dir.events, {"time": 1.7e9 + 80, "event": "started", "step": 100, "total_steps": 400})
    assert "It has failed" not in page_of(run_dir).text, "a later attempt has outlived it"


@pytest.mark.parametrize("label", ["x" * 400, "\N{CJK UNIFIED IDEOGRAPH-65E5}", "../-rf"], ids=["long", "CJK", "path"])
def test_pictures_have_file_names_that_every_file_system_takes(make_run: MakeRun, tmp_path: Path, label: str) -> None:
    text = write_logbook([Facts(make_run(steps=10), label)], tmp_path / "out")[0].read_text()
    assert pictures(text)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,120}", name) for name in pictures(text))


@pytest.mark.parametrize(("name", "write"), [("logbook.md", write_logbook), ("report.html", write_page)])
def test_what_cannot_be_written_is_refused_and_nothing_is_replaced(
    make_run: MakeRun, tmp_path: Path, name: str, write: Callable[..., object]
) -> None:
    (tmp_path / name).write_text("# Mine\n")
    with pytest.raises(UserError, match="was not written by this command") as caught:
        write(collect([make_run()]), tmp_path)
    assert "--out" in caught.value.fix
    assert (tmp_path / name).read_text() == "# Mine\n"
    with pytest.raises(UserError, match=f"Cannot write .*{name}"):
        write(collect([make_run("b")]), tmp_path / name / "out")


def test_a_run_that_never_began_is_an_error(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=0, finished=False)
    run_dir.events.unlink()
    with pytest.raises(UserError, match=r"Nothing to report on in ddp-0001\."):
        write_logbook(collect([run_dir]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_collaborative_run_tells_its_rounds_and_who_has_contributed(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run("hivemind-0001", preset="hivemind")
    assert "who contributed" not in written([run_dir], tmp_path / "before")
    for index, peers in enumerate((1, 3, 2)):
        told = {"split": "train", "step": 100 + index, "epoch": 1.0, "loss": 1.0, "round": index + 1, "peers": peers}
        sent = {"parts": 2 * (peers - 1), "parts_expected": 4, "bytes_up": 2_000_000, "bytes_down": 500_000}
        jsonl.append_jsonl(run_dir.metrics, {"time": 1.8e9 + index, **told, **sent})
    ledger, link = Contributions(), Counted("<b>![](http://x)", 500)  # as a guest may call itself
    ledger.add(3600.0, [Counted("anna", 3000, 4_510_000), Counted("b|o", 1000), link])
    ledger.write(run_dir)
    text = written([run_dir], tmp_path / "out")
    assert "| rounds | 3 of 15 |\n| averaged with others | 2, by up to 3 peers |\n| parts received | 50.0 % |" in text
    assert "| sent | 6.0 MB |\n| received | 1.5 MB |" in text
    assert "| anna | 3,000 | 66.7 % | 1 | 1.00 | 4.5 MB |\n| b\\|o | 1,000 | 22.2 % | 1 | 1.00 | – |" in text  # noqa: RUF001
    assert r"| \<b>![\](http://x) |" in text
    assert "Where the time went" not in text


def test_every_attempt_has_a_row_that_says_how_it_ended(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=0, finished=False)
    run_dir.events.unlink()
    both = {"world_size": 4, "hosts": ["n1", "n2"], "device": "NVIDIA T4"}
    for time, attempt, kind, fields in (
        (100.0, 0, "started", {"step": 0, **both}),
        (160.0, 0, "handed_back", {"step": 30, "signals": ["SIGUSR2"]}),
        (161.0, 0, "requeued", {}),
        (200.0, 1, "started", {"step": 30, **both, "world_size": 2, "hosts": ["n2"]}),
        (210.0, 1, "failed", {"rank": 1, "error": "NCCL error"}),
        (211.0, 1, "ended", {"state": "FAILED"}),
        (300.0, 2, "started", {"step": 30, **both}),
    ):
        jsonl.append_jsonl(run_dir.events, {"time": time, "event": kind, "attempt": attempt, **fields})
    jsonl.append_jsonl(run_dir.metrics, {"time": 349.0, "step": 50, "epoch": 2.5, "split": "train", "loss": 1.0})
    assert [(row[0], *row[2:]) for row in rows_of(chart_sections.attempts(Facts(run_dir, "r")))] == [
        ("0", "n1, n2", "4", "0 to 30", "1 min 01 s", "told to stop (SIGUSR2), saved, requeued"),
        ("1", "n2", "2", "30 to 30", "11.0 s", "failed on rank 1: NCCL error"),
        ("2", "n1, n2", "4", "30 to 50", "49.0 s", "killed without a word, or goes on"),
    ]
    costs = {row[0]: row[1] for row in rows_of(text_sections.cost(Facts(run_dir, "r")))}
    assert costs["GPU-hours"] == "0.128", "(61 s x 4 + 11 s x 2 + 49 s x 4) / 3600"


def test_the_log_book_of_a_sweep_names_its_runs_by_what_was_swept(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"ddp-0001/{index}", f"optim.lr={lr}") for index, lr in enumerate(("1e-3", "3e-3"))]
    write_sweep_of(runs[0].path.parent, ("optim.lr=1e-3", "seed=0"), ("optim.lr=3e-3", "seed=0"))
    jsonl.append_jsonl(runs[1].metrics, {"step": 400, "epoch": 20.0, "split": "val", "loss": 0.01, "acc1": 99.9})
    text = written(runs, tmp_path / "out")
    assert "# Log book: Sweep ddp-0001: 2 runs\n" in text
    assert re.findall("(?m)^## (.*)", text)[:2] == ["Results", "Curves"]
    assert re.findall("(?m)^### (lr.*)", text)[:2] == ["lr=3e-3", "lr=1e-3"], "the best first"
    assert "2 of 2 runs have finished." in text


def test_a_comparison_says_what_does_not_compare(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("ddp-0001"), make_run("[a](http", "model.name=resnet18"), make_run("ddp-0003", steps=200)]
    runs.append(make_run("ddp-0004", finished=False))
    runs[1].config.write_text("model: {name: '<img src=x> [a](http://b)'}\n")
    table, paths = write_comparison(collect(runs), tmp_path / "out")
    text = paths[0].read_text()
    assert "is not compared in speed, time and memory: model.name \\<img src=x> [a\\](http://b) and not fash" in text
    assert not re.search(r"(?<!\\)<img|(?<!\\)\]\(http", re.sub("`[^`]*`", "", text)), "no sentence is markup"
    assert "- ddp-0003 has no time ratio: it saw 12,800 images and not 25,600." in text
    assert "- ddp-0004 has no time ratio: ddp-0004 did not come to the end." in text
    assert table.splitlines()[2] in text
    assert "## Settings that differ" in text
    assert "Cost" not in text, "the comparison alone"


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
            (items,) = text_sections.places(facts)
        finally:
            os.seteuid(0)
    assert isinstance(items, Items)
    listed = [word for line in items.lines for word in line]
    assert str(run.path) in listed
    assert not {str(run.code), str(run.checkpoints)} & set(listed)


def test_a_task_is_told_by_its_own_metrics(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"s/{number}", f"optim.lr={number + 1}e-3", steps=0, finished=False) for number in range(2)]
    write_sweep_of(runs[0].path.parent, ("optim.lr=1e-3",), ("optim.lr=2e-3",))
    for run, best in zip(runs, (2.0, 1.5), strict=True):
        mean_error = Metric("px", higher_is_better=False, label="Mean error")
        describe(run, TaskMetrics("mae", {"loss": LOSS, "mae": mean_error}))
        for step, error in ((20, 3.0), (40, best), (60, 2.5)):
            record = {"step": step, "epoch": step / 10, "split": "val", "loss": error, "mae": error}
            jsonl.append_jsonl(run.metrics, record)
    book = written(runs, tmp_path)
    page = write_page(collect(runs), tmp_path).read_text()
    assert "Best by validation: lr=2e-3, val mae 1.5000 px." in book
    assert book.index("### lr=2e-3\n") < book.index("### lr=1e-3\n"), "the smaller error first"
    assert "| val, best checkpoint | 40 | 4.0 | 1.5000 | 1.5000 px |" in book
    assert "Mean error <" in page
    assert "images that were told wrong" not in book
    assert not [text for text in (book, page) if "acc1" in text or "accuracy" in text.lower()]


class Document(HTMLParser):
    """Tags with their attributes, and all text that is no script or style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open = list[str]()
        self.feed(text)
        assert self._open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data + " "

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def sections(self) -> list[str]:
        return [str(attributes["id"]) for attributes in self.named("section")]

    def series(self) -> dict[str, dict[float, float]]:
        """Title of the chart and name of the curve -> its numbers."""
        found: dict[str, dict[float, float]] = {}
        chart = ""
        for tag, attributes in self.tags:
            if tag == "svg":
                chart = (attributes.get("aria-label") or "").partition(":")[0]
            elif "data-y" in attributes:
                x, y = (map(float, str(attributes[f"data-{axis}"]).split()) for axis in "xy")
                found[f"{chart}, {attributes['data-name']}"] = dict(zip(x, y, strict=True))
        return found


def page_of(*runs: RunDir) -> Document:
    return Document(write_page(collect(runs), runs[0].path).read_text())


def test_one_run_has_its_curves_with_the_numbers_of_its_metrics(make_run: MakeRun) -> None:
    run, short = make_run(), make_run("ddp-0002", steps=20)
    page = page_of(run)
    series = page.series()
    assert list(series)[:8] == [
        *("Loss, train", "Loss, val", "Top-1 accuracy, train", "Top-1 accuracy, val"),
        *("Top-5 accuracy, train", "Top-5 accuracy, val", "Learning rate, train", "Throughput, train"),
    ]
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    val = {record["epoch"]: record["loss"] for record in records if record["split"] == "val"}
    assert series["Loss, val"] == pytest.approx(val, rel=1e-4)
    (top5,) = (svg for svg in page.named("svg") if str(svg.get("aria-label")).startswith("Top-5"))
    assert str(top5["data-range"]).split()[3] == "100", "nothing is more than all"
    assert list(page_of(short).series()["Loss, train"]) == [10, 20], "steps, of a run of one epoch"


def test_attempts_and_interruptions_are_on_the_time_line(make_run: MakeRun) -> None:
    page = page_of(make_run(restarts=(150, 300)))
    classes = {tag: [str(attributes.get("class")) for attributes in page.named(tag)] for tag in ("rect", "path")}
    assert classes["rect"].count("attempt c0") == 3
    assert "3 attempts" in page.text
    assert sum("restart" in each for each in classes["path"]) == 2 * 5


def test_of_many_events_the_first_and_the_last_are_told(make_run: MakeRun) -> None:
    run = make_run(steps=20)
    for second in range(150):
        jsonl.append_jsonl(run.events, {"time": 1.8e9 + second, "event": "save_failed", "step": second})
    rows = rows_of(chart_sections.timeline(collect([run])).parts)
    assert (len(rows), rows[0][2], rows[50][1], *rows[-1][1:]) == (101, "step 0", "50 more", "save failed", "step 149")


def test_a_loss_that_is_not_finite_is_marked_and_not_drawn_across(make_run: MakeRun) -> None:
    run = make_run(steps=200, finished=False)
    for step in range(210, 300, 10):
        jsonl.append_jsonl(run.metrics, {"step": step, "epoch": step / 20, "split": "train", "loss": None})
    assert "not finite, first at 10.5" in page_of(run).text


def test_a_pause_of_the_samples_of_hardware_is_no_value_that_is_not_finite(make_run: MakeRun) -> None:
    run = make_run(gpus=1)
    last = json.loads(run.hardware("node1").read_text().splitlines()[-1])
    for later in (600.0, 600.4):  # the next attempt
        jsonl.append_jsonl(run.hardware("node1"), {**last, "time": last["time"] + later})
    page = page_of(run)
    assert "node1 · use, CPUs" in page.series()
    assert "not finite" not in page.text


def test_the_time_of_rank_0_is_shown_by_what_it_went_on(make_run: MakeRun) -> None:
    run = make_run()
    spent = {"data": 1.0, "exposed": 0.0, "forward": 3.0}
    run.summary.write_text(json.dumps({"outcome": "finished", "seconds": spent}))
    page = page_of(run)
    assert re.search(r"data: waiting for data\s+1\.0\s+25\.0 %", page.text)
    assert re.search(r"all\s+4\.0\s+100 %", page.text)
    widths = [attributes["width"] for attributes in page.named("rect") if "part c" in str(attributes.get("class"))]
    assert widths == ["25%", "75%"]


def confusion(run: RunDir, names: list[str], counts: list[list[int]]) -> None:
    run.confusion.write_text(json.dumps({"split": "test", "step": 400, "classes": names, "raw": counts}))


def test_classes_are_told_with_what_they_are_taken_for(make_run: MakeRun) -> None:
    run = make_run()
    confusion(run, ["cat", "dog", "owl"], [[0, 0, 8], [0, 1, 2], [1, 1, 5], [2, 2, 9]])
    page = page_of(run)
    assert "ddp-0001, test, step 400 " in page_of(make_run("ddp-0002"), run).text, "of several runs each says it"
    assert "Confusion matrix of 3 classes: 2 of 24 told wrong" in str(page.named("svg"))
    assert re.search(r"cat\s+dog\s+2\s+20\.0 %", page.text)
    labels = [attributes.get("aria-label") for attributes in page.named("svg")]
    assert "Accuracy by class: cat 80.0 % of 10; dog 100.0 % of 5; owl 100.0 % of 9" in labels


@pytest.mark.parametrize(("names", "turned"), [("0 6 9", 0), ("cat dog owl", 3)])
def test_names_of_columns_are_turned_where_they_would_meet(make_run: MakeRun, names: str, turned: int) -> None:
    confusion(run := make_run(), names.split(), [[0, 0, 8], [1, 2, 5]])
    texts = page_of(run).named("text")
    assert len([text for text in texts if str(text.get("transform")).startswith("rotate")]) == turned


def test_a_thousand_classes_are_a_list_and_no_picture_of_a_million_cells(make_run: MakeRun) -> None:
    run = make_run()
    confusion(run, [f"n{at:04}" for at in range(1000)], [[at, (at + at % 2) % 1000, 5] for at in range(1000)])
    path = write_page(collect([run]), run.path)
    assert "All 1000 classes" in Document(path.read_text()).text
    assert path.stat().st_size < 400_000


HOSTILE = """" onload="x" ></script><script>alert(1)</script><b onclick=1>'&amp;"""


def test_nothing_that_a_run_says_becomes_markup(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("<b>run", "seed=1", finished=False)
    pixel = {"label": HOSTILE, "told": HOSTILE, "confidence": 0.9}
    confusion(run, [HOSTILE, "dog"], [[0, 1, 3], [1, 1, 4]])
    run.mistakes("val").write_text(json.dumps({"images": [{**pixel, "png": HOSTILE}, {**pixel, "png": "PHN2Zz4="}]}))
    run.hardware("node1").rename(run.hardware(f"<i>{'x' * 20}"))
    run.manifest.write_text(json.dumps({"git": {"commit": HOSTILE}}))
    event: dict[str, Any] = {"time": 1.7e9, "event": "failed", "rank": 0, "host": HOSTILE, "error": HOSTILE}
    jsonl.append_jsonl(run.events, event)
    jsonl.append_jsonl(run.events, {"time": 1.7e9, "event": "started", "hosts": [HOSTILE], "device": HOSTILE})
    page = Document(write_page(collect([run]), tmp_path).read_text())
    assert len(page.named("script")) == 1
    assert page.named("img") == page.named("b") == page.named("i") == []
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert """</script><script>alert(1)</script><b onclick=1>""" in page.text


def test_what_a_run_says_stands_there_as_it_was_written_and_in_its_order(make_run: MakeRun) -> None:
    run, other = make_run(), make_run("ddp-0002")
    run.config.write_text("model: {name: 'a`b`c', '\u202efdp.x': 1}\nstrategy: {name: '\u202egnp.exe'}\n")
    run.hardware("node1").rename(run.hardware("\u202eh"))
    page = page_of(run, other)
    assert page.text.count("a`b`c") == 4, "in the lead, what does not compare, what differs and the settings"
    assert "\u202e" not in page.text
    assert page.text.count("gnp.exe") == 4


def test_a_long_name_leaves_room_for_the_other_columns(make_run: MakeRun) -> None:
    cells = page_of(make_run("x" * 70, f"model.checkpoint={'y' * 300}")).named("td")
    assert {"long", "number"} <= {str(cell.get("class")) for cell in cells}


def test_the_page_may_load_nothing_and_run_nothing_but_its_own_script(make_run: MakeRun) -> None:
    page = page_of(make_run())
    (policy,) = [str(a["content"]) for a in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not [attributes for _, attributes in page.tags if {"style", "src"} & set(attributes)]
    assert not [a for _, a in page.tags if not str(a.get("href", "#")).startswith("#")]


def test_an_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("not: [valid")
    page = page_of(RunDir(tmp_path))
    assert page.sections() == ["missing", "files"]
    missing = "training metrics|validation metrics|test metrics|final numbers \\(summary.json\\)|hardware samples"
    assert len(re.findall(f"(?:{missing}):", page.text)) == 5


def test_of_many_runs_the_curves_of_the_best_are_overlaid(make_run: MakeRun) -> None:
    runs = [make_run(f"ddp-{at:04}", steps=20 * at) for at in range(1, 12)]
    drawn = {name.split(" ")[1] for name in page_of(*runs).series() if name.startswith("Loss")}
    assert drawn == {f"ddp-{at:04}" for at in range(4, 12)}


def test_a_run_that_does_not_compare_is_no_part_of_the_scaling(make_run: MakeRun) -> None:
    runs = [make_run(ranks=1, speed=1000.0), make_run("ddp-0002", ranks=2, speed=1900.0)]
    runs += [make_run("ddp-0003", ranks=4, speed=2e4), make_run("ddp-0004", ranks=8, taken=93.0)]
    page = page_of(*runs, make_run("ddp-0005", "data.name=cifar10", ranks=4, speed=9e5))
    assert page.series()["Speed-up, measured"] == pytest.approx({1: 1, 2: 1915 / 1015}, rel=1e-2)
    assert page.series()["Efficiency, efficiency"] == pytest.approx({1: 100, 2: 50 * 1915 / 1015}, rel=1e-2)
    assert "Speed-up, measured" not in page_of(runs[0], make_run("ddp-0006", ranks=1)).series()


def test_of_many_runs_the_classes_and_mistakes_of_the_best_are_shown(make_run: MakeRun) -> None:
    runs = [make_run(f"ddp-{at:04}", steps=20 * at) for at in range(1, 7)]
    for run in (runs[0], runs[-1]):
        confusion(run, ["cat", "dog"], [[0, 0, 5], [1, 1, 5]])
    page = page_of(*runs)
    assert "The best 4 of 6 runs, by validation." in page.text
    assert re.findall(r"(ddp-\d+), test, step", page.text) == ["ddp-0006"]
    assert re.findall(r"(ddp-\d+), val, step", page.text) == [f"ddp-000{at}" for at in (6, 5, 4, 3)]


def test_of_many_gpus_the_mean_has_the_label(make_run: MakeRun) -> None:
    run = make_run(gpus=8)
    page = page_of(run)
    assert {"node1 · use, GPU 1", "node1 · memory, node", "node1 · power, GPU 0"} <= set(page.series())
    samples = [json.loads(line)["gpus"] for line in run.hardware("node1").read_text().splitlines()]
    mean = sum(gpu["util_percent"] for gpu in samples[-1]) / 8
    assert list(page.series()["node1 · use, GPU mean"].values())[-1] == pytest.approx(mean)
    assert f"GPU mean {mean:.0f}" in page.text
    assert "GPU 3 9" not in page.text


ODD: list[Any] = [
    *(0, 1, -1, 1e18, -1e18, 5e-324, 1e-300, 0.5, 100, 2**53 - 1, float("nan"), float("inf"), 10**30, 1e-17, -5),
    *(None, "x", [1], {"a": 1}, True, "<b>", 1.8e9),
]
CONFIGS = (
    *("not: [valid", "[]", ""),
    "optim: 3\nschedule: {name: 1, warmup_epochs: q}\nlaunch: {nodes: x}\nstrategy: {name: [dp]}\n",
    "train: {global_batch_size: 64}\nstrategy: {name: dp}\nschedule: {name: a, warmup_epochs: 2}\n",
)


def bent(value: Any, rng: random.Random) -> Any:
    """The same with some of it left out, and some of it anything."""
    if rng.random() < 0.2:
        return rng.choice(ODD) if rng.random() < 0.6 else rng.random() * 10 ** rng.randint(-12, 12)
    if isinstance(value, dict):
        return {key: bent(own, rng) for key, own in value.items() if rng.random() < 0.9}
    return [bent(own, rng) for own in value] if isinstance(value, list) else value


def odd_run(path: Path, rng: random.Random) -> RunDir:
    """Every file of a run, with anything in it."""
    what: dict[str, Any] = {"steps": rng.choice((0, 40)), "gpus": rng.randint(0, 2), "finished": rng.random() < 0.7}
    run = write_run(path, restarts=(20,), **what)
    confusion(run, ["a", "b", "<"], [[0, 1, 3], [1, 1, 2], [0, 0, 2**52]])
    image = {"label": 1, "told": 2, "confidence": 1, "png": "iVBORw0KGgo="}
    run.mistakes("val").write_text(json.dumps({"step": 7, "images": [image]}))
    run.manifest.write_text('{"command": ["a"], "packages": {"a": "b"}, "git": {"commit": "a"}, "host": "h"}')
    for kind in ("submitted", "probed", "excluded", "nonfinite", "rolled_back", "handed_back", "failed", "straggler"):
        event = {"time": 1.7e9 + rng.random() * 1e5, "event": kind, "hosts": ["a<"], "signals": ["x"], "error": "<b>"}
        counts = {"attempt": 1, "step": 7, "micro_batch_size": 4, "world_size": 2, "rank": 0}
        jsonl.append_jsonl(run.events, event | counts)
    for step in (50, 60):
        sent = {"round": 1, "peers": 2, "parts": 3, "parts_expected": 4, "seconds_data": 1.0, "seconds_forward": 2.0}
        jsonl.append_jsonl(run.metrics, {"step": step, "split": "train", "epoch": 1.0, "loss": 1.0, **sent})
    for file in [file for file in run.path.iterdir() if file.suffix in (".json", ".jsonl")]:
        lines = [json.dumps(bent(json.loads(line), rng)) for line in file.read_text().splitlines() if line]
        file.write_text("".join(line + rng.choice(["\n", "\n", '\n{"torn']) for line in lines))
    if rng.random() < 0.5:
        run.config.write_text(rng.choice(CONFIGS))
    return run


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 12))])
def test_of_any_record_there_is_a_report_with_places_that_exist(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for case in range(20):
        runs = [odd_run(tmp_path / str(case) / f"run-{at}", rng) for at in range(rng.randint(1, 3))]
        texts = [write_page(collect(runs), tmp_path / str(case)).read_text()]
        assert Document(texts[0]).sections() != []
        with suppress(UserError):  # nothing of it has begun
            drawn = [path for path in write_logbook(collect(runs), tmp_path / str(case)) if path.suffix == ".svg"]
            texts += [path.read_text() for path in drawn if ElementTree.parse(path)]
            write_comparison(collect(runs), tmp_path / str(case))
        for text in texts:
            assert re.findall(r' (?:d|x|y|x1|x2|cx|cy|width|data-[a-z]+)="[^"]*\b(?:nan|inf)\b[^"]*"', text) == []
