from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.errors import UserError
from trainkit.records import jsonl
from trainkit.records.contributions import Contributions, Counted
from trainkit.records.rundir import RunDir
from trainkit.report.logbook import write_logbook

MakeRun = Callable[..., RunDir]


def written(runs: list[RunDir], out: Path) -> str:
    paths = write_logbook(runs, out)
    assert all(path.is_file() for path in paths)
    return paths[0].read_text(encoding="utf-8")


def pictures(text: str) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)


def test_the_log_book_of_one_run_lies_beside_its_plots(make_run: MakeRun, tmp_path: Path) -> None:
    text = written([make_run()], tmp_path / "out")
    assert "# Log book: ddp-0001" in text
    assert pictures(text) == ["ddp-0001-curves.png", "ddp-0001-pace.png", "ddp-0001-hardware.png"]
    for name in pictures(text):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_it_has_settings_results_and_costs(make_run: MakeRun, tmp_path: Path) -> None:
    text = written([make_run(gpus=1)], tmp_path / "out")
    for line in (
        "| strategy | ddp |",
        "| test, best checkpoint | 400 | 0.0600 | 98.90 % | 100.00 % |",
        "| training time | 12.8 s |",
        "| throughput, median | 2,010 images/s |",
        "| peak memory of rank 0 | 812 MB |",
        "| GPU 0 of node1 | 90 % | 90 % | 8.8 GB of 16.0 GB | 65 W | – |",  # noqa: RUF001
        "| attempts | 1 (0 requeued) |",
    ):
        assert line in text
    assert "Not recorded" not in text


def test_several_runs_are_compared_with_the_first(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("single-0001", preset="single", ranks=1, speed=990.0), make_run("ddp-0002", speed=1850.0)]
    text = written(runs, tmp_path / "out")
    assert "| ddp-0002 | ddp | 2 | 400 | 98.71 % | 98.90 % | 13.8 s | 1,860 | 1.86× | 93 % | 1.87× | 812 MB |" in text  # noqa: RUF001
    assert "| strategy.name | single | ddp |" in text
    assert pictures(text)[:2] == ["throughput.png", "val-acc1.png"]
    assert text.count("\n## ") == 3


def test_an_interrupted_run_says_so_and_what_it_lacks(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=200, finished=False)
    jsonl.append(run_dir.events, {"time": 1.7e9, "event": "failed", "rank": 1, "error": "ValueError: `x`\nmore"})
    text = written([run_dir], tmp_path / "out")
    assert "**Not finished**: 200 of 400 steps. It failed on rank 1: `ValueError: 'x'`." in text
    assert "(estimated from the records)" in text
    assert f"- test metrics: `python -m jobs.evaluate {run_dir.path}` measures them" in text


def test_a_run_without_hardware_samples_is_reported(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run()
    run_dir.hardware("node1").unlink()
    text = written([run_dir], tmp_path / "out")
    assert "- hardware samples: " in text
    assert pictures(text) == ["ddp-0001-curves.png", "ddp-0001-pace.png"]


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
        jsonl.append(run_dir.metrics, {**record, "split": "train", "lr": 1e-3})
        jsonl.append(run_dir.metrics, {**record, "split": "val"})
        jsonl.append(run_dir.events, {"event": "nonfinite", "step": step})
    text = written([run_dir], tmp_path / "out")
    assert "190 of 400 steps. **It has diverged**: loss nan from step 30, 17 of 190 updates skipped." in text


def test_a_run_of_a_single_evaluation_is_reported(make_run: MakeRun, tmp_path: Path) -> None:
    assert len(pictures(written([make_run(steps=20)], tmp_path / "out"))) == 3


def test_the_long_curve_of_a_real_training_is_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    assert len(pictures(written([make_run(steps=20_000, restarts=(150,))], tmp_path / "out"))) == 3


def test_runs_of_one_name_do_not_overwrite_each_others_plots(make_run: MakeRun, tmp_path: Path) -> None:
    text = written([make_run("a/ddp-0001"), make_run("b/ddp-0001")], tmp_path / "out")
    assert len(set(pictures(text))) == len(pictures(text)) == 8


def test_a_second_report_replaces_the_first(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run()
    assert written([run_dir], tmp_path / "out") == written([run_dir], tmp_path / "out")


def test_a_log_book_that_somebody_wrote_is_never_replaced(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "logbook.md").write_text("# Mine\n")
    with pytest.raises(UserError, match="was not written by this command"):
        write_logbook([make_run()], tmp_path)
    assert (tmp_path / "logbook.md").read_text() == "# Mine\n"


def test_a_run_that_never_began_is_an_error(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=0, finished=False)
    run_dir.events.unlink()
    with pytest.raises(UserError, match=r"Nothing to report on in ddp-0001\."):
        write_logbook([run_dir], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_failed_before_its_first_record_is_reported(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(steps=0, finished=False)
    for _ in range(3):
        jsonl.append(run_dir.events, {"event": "nonfinite", "step": 0, "loss": "nan"})
    jsonl.append(run_dir.events, {"time": 1.7e9, "event": "failed", "rank": 0, "error": "Training has diverged."})
    text = written([run_dir], tmp_path / "out")
    assert "0 of 400 steps. It failed on rank 0: `Training has diverged.`" in text
    assert "- training metrics: metrics.jsonl has none" in text


def test_a_folder_that_cannot_be_made_is_an_error(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write the log book"):
        write_logbook([make_run()], tmp_path / "file" / "out")


def test_the_gpus_are_in_the_log_book_as_nvidia_smi_shows_them(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run("ddp-0001")
    (run_dir.path / "nvidia-smi-node1.txt").write_text("driver 550.54\nGPU 0  NVIDIA T4\n``` \x1b[31mred\n")
    text = write_logbook([run_dir], tmp_path / "out")[0].read_text()
    assert "GPUs of node1:\n\n```\ndriver 550.54\nGPU 0 NVIDIA T4\n''' red\n```" in text


def test_a_collaborative_run_names_who_has_contributed_how_much(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run("hivemind-0001", preset="hivemind")
    assert "Contributions" not in written([run_dir], tmp_path / "before")
    ledger = Contributions()
    link = Counted("<b>![](http://x)", 500)  # as anybody may call itself in an open run
    ledger.add(3600.0, [Counted("anna", 3000, 4_510_000), Counted("b|o", 1000), link])
    ledger.write(run_dir)
    text = written([run_dir], tmp_path / "out")
    assert "| anna | 3,000 | 66.7 % | 1 | 1.00 | 4.5 MB |" in text
    assert "| b\\|o | 1,000 | 22.2 % | 1 | 1.00 | – |" in text  # noqa: RUF001
    assert r"| \<b\>!\[\](http://x) |" in text


def test_a_collaborative_run_tells_its_rounds_and_what_was_sent(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run("hivemind-0001", preset="hivemind")
    for index, peers in enumerate((1, 3, 2)):
        told = {"split": "train", "step": 100 + index, "epoch": 1.0, "loss": 1.0, "round": index + 1, "peers": peers}
        sent = {"parts": 2 * (peers - 1), "parts_expected": 4, "bytes_up": 2_000_000, "bytes_down": 500_000}
        jsonl.append(run_dir.metrics, {"time": 1.8e9 + index, **told, **sent})
    text = written([run_dir], tmp_path / "out")
    assert "| rounds | 3 of 15 |" in text
    assert "| averaged with others | 2, by up to 3 peers |" in text
    assert "| parts received | 50.0 % |" in text
    assert "| sent | 6.0 MB |\n| received | 1.5 MB |" in text
    assert "time of rank 0 went on" not in text
