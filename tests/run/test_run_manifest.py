"""What a run was made of: its manifest, where others get the same program, and its fingerprint."""

import json
import os
import subprocess
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from trainkit.config.loading import load
from trainkit.run import code_files, run_manifest, user_lists
from trainkit.run.folder import RunDir
from trainkit.run.run_manifest import fingerprint, same_runs

pytestmark = pytest.mark.usefixtures("program")


def manifest(run: RunDir, *command: str) -> dict[str, Any]:
    run_manifest.write_manifest(run, list(command))
    content: dict[str, Any] = json.loads(run.manifest.read_text())
    return content


# Manifest


def repository() -> Callable[..., None]:
    """A repository in the current folder, with a commit."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=me", "-c", "user.email=me@example.org", *words], check=True)

    git("init", "-q")
    Path("kept.txt").write_text("one\n")
    Path("old.pem").write_text("".join(f"line {n} of a key\n" for n in range(20)))
    git("add", ".")
    git("commit", "-qm", "x")
    return git


def test_a_diff_omits_credentials_renamed_ones_by_both_names(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    git = repository()
    Path("sub").mkdir()
    Path("sub/.netrc").write_text("machine x s3cret\n")
    Path("\u00e4 b.key").write_text("s3cret\n")
    git("mv", "old.pem", "notes.txt")
    Path("kept.txt").write_text("two\n")
    git("add", ".")
    os.chdir("sub")  # names are those from the top
    written = manifest(run)
    assert "+two" in written["git"]["diff"]
    assert not [word for word in ("s3cret", "of a key", "netrc", "pem") if word in written["git"]["diff"]]
    told = capsys.readouterr().err
    assert all(name in told for name in ("sub/.netrc", "old.pem", "notes.txt", "b.key"))


def test_the_users_own_diff_program_is_not_asked_and_any_encoding_will_do(run: RunDir) -> None:
    git = repository()
    git("config", "diff.external", "false")
    git("config", "diff.noprefix", "true")
    Path("kept.txt").write_bytes(b"gr\xfc\xdfe\n")
    written = manifest(run)["git"]["diff"]
    assert "diff --git a/kept.txt b/kept.txt" in written
    assert "+gr" in written


def test_the_manifest_says_what_ran_and_no_secret_or_environment(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "s3cret")
    words = ["WANDB_API_KEY=s3cret", "--token=s3cret", "remote.secret_key=s3cret", "password:s3cret"]
    written = manifest(run, "python", "-m", "jobs.submit", "ddp", *words)
    assert written["command"][:4] == ["python", "-m", "jobs.submit", "ddp"]
    assert written["cwd"] == str(Path.cwd())
    assert written["packages"].keys() == set(run_manifest.PACKAGES), "all are installed here"
    assert set(written["git"]) == {"commit", "diff", "untracked"}
    assert "s3cret" not in json.dumps(written)


def test_the_diff_of_python_is_read_as_python(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """`token = tokenizer(x)` is code there; in a shell script a value needs no quotes."""
    code = "diff --git a/m.py b/m.py\n+    password = read_password()\n+    secret = 'hunter2'\n"
    script = "diff --git a/run.sh b/run.sh\n+PASSWORD=hunter3\n"
    monkeypatch.setattr(code_files, "git_says", lambda *arguments: code + script if arguments[0] == "diff" else "")
    written = manifest(run)
    assert written["git"]["diff"] == (code + script).replace("hunter2", "***").replace("hunter3", "***")
    assert [(item["what"], item["kind"]) for item in written["withheld"]] == [
        ("the diff", "Secret Keyword"), ("the diff", "value of PASSWORD"),
    ]  # fmt: skip


def test_without_git_the_manifest_says_the_rest(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert manifest(run)["git"] == {"commit": None, "diff": "", "untracked": []}


# Where others get the same program

PUBLIC = "https://git.example/anna/kit"
KIT = {"trainkit/data/order.py": "x = 1\n", "trainkit/report/page.py": "x = 1\n"}
INSTALLED_AS = "trainkit_vision-0.1.0.dist-info"


def at(commit: str) -> tuple[str, str]:
    return f"commit {commit} of {PUBLIC}", f"trainkit-vision @ git+{PUBLIC}@{commit}"


class Clone:
    """Of a repository that everybody reads at `PUBLIC`: git is told that it lies in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = folder / "clone"
        rewritten = {"COUNT": "1", "KEY_0": f"url.file://{folder / 'public'}.insteadOf", "VALUE_0": PUBLIC}
        who = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        for name, value in {**{f"GIT_CONFIG_{key}": value for key, value in rewritten.items()}, **who}.items():
            monkeypatch.setenv(name, value)
        self("init", "-q", "--bare", str(folder / "public"), at=folder)
        self("clone", "-q", str(folder / "public"), str(self.top), at=folder)
        for name, text in KIT.items():
            (self.top / name).parent.mkdir(parents=True)
            (self.top / name).write_text(text)
        self("config", "remote.origin.url", PUBLIC)
        self.commit()
        self("push", "-q", "origin", "HEAD")
        monkeypatch.setattr(code_files, "INSTALLED", self.top)

    def __call__(self, *words: str, at: Path | None = None) -> str:
        return subprocess.run(["git", *words], cwd=at or self.top, check=True, capture_output=True, text=True).stdout

    def commit(self) -> str:
        self("add", "-A")
        self("commit", "-qm", "x", "--allow-empty")
        return self("rev-parse", "HEAD").strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    return Clone(tmp_path, monkeypatch)


def test_a_pushed_commit_is_had_from_its_public_place_also_a_shallow_one(clone: Clone) -> None:
    commit = clone("rev-parse", "HEAD").strip()
    assert run_manifest.origin(["trainkit/data"]) == at(commit)
    (clone.top / "trainkit/report/page.py").write_text("x = 2\n")  # decides about nothing that peers have alike
    assert run_manifest.origin(["trainkit/data"]) == at(commit)
    (clone.top / ".git" / "shallow").write_text(f"{commit}\n")  # as `git clone --depth 1` leaves it
    assert run_manifest.origin(["trainkit/data"]) == at(commit)
    for url in ("git@git.example:anna/kit", "ssh://git@git.example/anna/kit"):
        clone("config", "remote.origin.url", url)
        assert run_manifest.origin(["trainkit/data"]) == at(commit)


@pytest.mark.parametrize("change", ["trainkit/data/order.py", "trainkit/data/new.py"])
def test_what_was_changed_or_not_pushed_or_needs_a_password_is_nowhere(clone: Clone, change: str) -> None:
    commit = clone("rev-parse", "HEAD").strip()
    for url in ("https://me:secret@git.example/anna/kit", "https://git.example/other", "--upload-pack=x", "/a/folder"):
        clone("config", "remote.origin.url", url)
        assert run_manifest.origin(["trainkit/data"]) == (f"commit {commit}", "")
    clone("config", "remote.origin.url", PUBLIC)
    (clone.top / change).write_text("x = 2\n")
    assert run_manifest.origin(["trainkit/data"]) == (f"commit {commit} with changes of its own", "")
    commit = clone.commit()
    assert run_manifest.origin(["trainkit/data"]) == (f"commit {commit}", "")


def test_without_git_nothing_is_known_of_a_checkout(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert run_manifest.origin(["trainkit/data"]) == ("", "")


def test_a_repository_is_public_if_nobody_is_asked_who_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    class Private(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), Private) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert not run_manifest._is_public(f"http://127.0.0.1:{server.server_port}/anna/kit")
        server.shutdown()
    assert asked
    assert not any(asked)


COMMIT = "ab" * 20
BY_GIT = {"vcs_info": {"vcs": "git", "commit_id": COMMIT}}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (None, ("trainkit-vision 0.1.0", "trainkit-vision==0.1.0")),
        ({"url": PUBLIC, **BY_GIT}, at(COMMIT)),
        ({"url": "https://${PASSWORD}@git.example/anna/kit", **BY_GIT}, (f"commit {COMMIT}", "")),
        ({"url": "file:///home/anna/trainkit_vision-0.1.0-py3-none-any.whl", "archive_info": {}}, ("", "")),
    ],
)
def test_what_pip_has_installed_is_had_by_version_or_where_it_came_from(
    clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any] | None, found: tuple[str, str]
) -> None:
    place, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    (place / "trainkit").mkdir(parents=True)
    (place / INSTALLED_AS).mkdir()
    (place / INSTALLED_AS / "METADATA").write_text("Metadata-Version: 2.1\nName: trainkit-vision\nVersion: 0.1.0\n")
    if told is not None:
        (place / INSTALLED_AS / "direct_url.json").write_text(json.dumps(told))
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(code_files, "INSTALLED", place)
    assert run_manifest.origin([]) == found
    monkeypatch.setattr(code_files, "INSTALLED", elsewhere)  # a copy of a job's, say
    assert run_manifest.origin([]) == ("", "")


# Fingerprints


def mark_of(*overrides: str, code: str = "c") -> str:
    return fingerprint(load("ddp", overrides).config, code)


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        (("launch.partition=gpu", "launch.time=10"), True),
        # More ranks: that is how scaling is measured.
        *((("launch." + setting,), False) for setting in ("nodes=2", "gpus_per_node=2", "ntasks_per_node=2")),
        *(((setting,), False) for setting in ("seed=1", "optim.lr=1e-4", "model.width=8", "data.root=elsewhere")),
    ],
)
def test_a_run_is_the_same_wherever_it_trains_with_equal_settings(overrides: tuple[str, ...], same: bool) -> None:
    assert (mark_of(*overrides) == mark_of()) == same
    assert mark_of(*overrides, code="other") != mark_of()


def test_other_data_in_the_same_folder_makes_it_another(tmp_path: Path) -> None:
    root = f"data.root={tmp_path}"
    (tmp_path / "train").mkdir()
    (tmp_path / "train.bin").write_bytes(b"1")
    before = mark_of(root)
    assert mark_of(root) == before
    (tmp_path / ".lock").touch()
    assert mark_of(root) == before, "a hidden file is nobody's data"
    (tmp_path / "train.bin").write_bytes(b"22")
    changed = mark_of(root)
    assert changed != before
    (tmp_path / "train" / "cat").mkdir()
    assert mark_of(root) != changed


def run_of(path: Path, mark: str) -> RunDir:
    run = RunDir.create(path, "seed: 0\n")
    run.manifest.write_text(f'{{"fingerprint": "{mark}"}}')
    user_lists.mark(path, mark)
    return run


def test_the_same_runs_are_found_by_their_mark_while_they_are_what_they_were(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "a", "m1"), run_of(tmp_path / "b", "m1")
    other, replaced = run_of(tmp_path / "c", "m2"), run_of(tmp_path / "d", "m1")
    run_of(tmp_path / "e", "m1").config.unlink()
    replaced.manifest.write_text('{"fingerprint": "m9"}')
    assert same_runs(["m1", "m2", "m3"]) == {"m1": [first, second], "m2": [other]}
