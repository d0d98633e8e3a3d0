"""``python -m jobs.cluster discover|show``."""

from pathlib import Path

from tests.jobs.conftest import Command


def test_discover_writes_a_profile_that_submit_takes(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    done = command("cluster", "discover", "mine").ok("use it with --cluster mine")
    assert "not known   scontrol show config" not in done.out
    assert (tmp_path / "configs/clusters/mine.yaml").is_file()
    dry = command("submit", "ddp", "--cluster", "mine", "--dry-run").ok()
    assert "cluster profile configs/clusters/mine.yaml:3" in dry.err


def test_the_placeholder_of_a_profile_is_no_account(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("launch: {account: CHANGE_ME}\n")
    command("submit", "ddp", "--cluster", "site.yaml").refused(2, "still CHANGE_ME (cluster profile site.yaml:1)")
    assert not (fake_slurm / "submitted.sbatch").exists()


def test_a_profile_is_renewed_only_with_force_and_keeps_its_settings(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "configs/clusters/mine.yaml"
    profile.parent.mkdir(parents=True)
    settings = "# ours\nlaunch: {account: thesis}   # since March\n"
    profile.write_text(settings)
    assert (command("cluster", "discover", "mine").code, profile.read_text()) == (2, settings)
    assert command("cluster", "discover", "mine", "--force").code == 0
    first = profile.read_text()
    assert first.startswith(settings)
    assert "  - name: main\n" in first
    assert command("cluster", "discover", "mine", "--force").code == 0
    assert profile.read_text() == first


def test_show_says_what_a_site_has_and_what_a_profile_sets(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    command("cluster", "show").ok("main*  2 x 8 CPUs, 4 GPUs  no time limit")
    command("cluster", "show", "devcluster").ok("launch.partition = main", "jobs.cluster discover")
    assert not (tmp_path / "configs").exists()
