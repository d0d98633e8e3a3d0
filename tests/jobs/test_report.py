from pathlib import Path

import pytest

from jobs.report import main
from trainkit.common import jsonl
from trainkit.common.errors import UserError
from trainkit.run.folder import RunDir


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        run_dir = RunDir.create(tmp_path / "runs" / f"ddp-000{number}", "seed: 0\n")
        jsonl.append_jsonl(run_dir.metrics, {"step": 10, "epoch": 1.0, "split": "val", "loss": 0.5, "acc1": 90.0})
    return {"TRAINKIT_RUNS": str(tmp_path / "runs")}


@pytest.mark.parametrize("name", ["a\x1b]0;title\x07\nb", "a\u202eb", "a\udcffb"])
def test_the_folder_of_a_run_may_have_any_name(
    env: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = (tmp_path / "runs" / "ddp-0001").rename(tmp_path / "runs" / name)
    main([str(folder)], env)
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
    assert (folder / "logbook.md").read_text().replace("\n", "").isprintable()
    assert (folder / "report.html").is_file()


def test_several_runs_go_into_a_folder_report_and_one_given_twice_is_one(env: dict[str, str], tmp_path: Path) -> None:
    main(["ddp-0001", str(tmp_path / "runs" / "ddp-0001")], env)
    assert (tmp_path / "runs" / "ddp-0001" / "logbook.md").is_file()
    main(["ddp-0001", str(tmp_path / "runs" / "ddp-0002")], env)
    assert "# Log book: 2 runs" in (tmp_path / "report" / "logbook.md").read_text()


def test_a_comparison_is_printed_and_needs_two_runs(env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["ddp-0001", "ddp-0002", "--compare", "--out", "both"], env)
    assert "| run | strategy |" in capsys.readouterr().out
    assert sorted(path.suffix for path in Path("both").iterdir() if path.suffix != ".svg") == [".html", ".md"]
    assert not Path("both/logbook.md").exists()
    with pytest.raises(UserError, match="--compare needs two runs or more"):
        main(["ddp-0001", "--compare"], env)


def test_a_received_folder_with_links_in_it_costs_no_file_of_ones_own(env: dict[str, str], tmp_path: Path) -> None:
    """Names that a stranger can foresee lead to the reader's own files, or to where a new one does harm."""
    run, home = tmp_path / "runs" / "ddp-0001", tmp_path / "home"
    jsonl.append_jsonl(run / "metrics.jsonl", {"step": 10, "epoch": 1.0, "split": "train", "loss": 0.5})
    home.mkdir()
    victims = {}
    for name in (".report.html.partial", "ddp-0001-curves.svg", ".logbook.md.partial", "logbook.md"):
        victims[name] = home / f"victim-of-{name}"
        victims[name].write_text("precious")
        (run / name).symlink_to(victims[name])
    (run / "report.html").symlink_to(home / "new.html")
    main(["ddp-0001"], env)
    assert {victim.read_text() for victim in victims.values()} == {"precious"}
    assert not (home / "new.html").exists()
    assert (run / "ddp-0001-curves.svg").read_text().startswith("<svg")
    assert not any((run / name).is_symlink() for name in ("logbook.md", "report.html", "ddp-0001-curves.svg"))
