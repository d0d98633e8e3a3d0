"""The manifest of a run: commit, changes, packages, host and command line."""

import hashlib
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from trainkit.common import fileio, process
from trainkit.config.schema import Config
from trainkit.run import code_files, secrets, user_lists
from trainkit.run.code_files import Withheld, say_once, withheld_by_name
from trainkit.run.folder import RunDir

LONGEST_DIFF = 2_000_000
SENT = "sent.json"
"""Lies beside code that came from another machine: what git said of it there, as in a manifest."""
DISTRIBUTION = "trainkit-vision"
PACKAGES = (
    DISTRIBUTION, "torch", "torchvision", "timm", "submitit", "hivemind", "tensorboard", "wandb", "pydantic", "numpy",
    "safetensors",
)  # fmt: skip
PUBLIC_URL = r"https://[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[A-Za-z0-9_~][A-Za-z0-9_.~-]*)+"
"""Address of a repository: no credentials, no options, nothing that a shell reads."""
LONGEST_URL = 200


def write_manifest(
    run_dir: RunDir, command: Sequence[str], withheld: Sequence[Withheld] = (), *, fingerprint: str = ""
) -> None:
    """Record git commit, uncommitted changes, package versions, host and command line. Never the environment.

    What looks like a credential is replaced by ``***``. The manifest and one line on stderr name what was replaced and
    what was ``withheld`` from the snapshot.
    """
    left_out = list(withheld)

    def redacted(text: str, what: str, *, python: bool = False) -> str:
        found = secrets.find(text, python=python)
        for item in found:
            left_out.append(Withheld(what, item.line, item.kind))
        return secrets.redacted(text, found)

    diff, excluded = _diff()
    left_out += excluded
    if len(diff) > LONGEST_DIFF:
        diff = f"left out: {len(diff)} characters\n"
    shown = ""
    for part in re.split(r"(?m)^(?=diff --git )", diff):  # begins with the name of its file
        shown += redacted(part, "the diff", python=part.partition("\n")[0].endswith(".py"))
    manifest: dict[str, Any] = {
        "command": [redacted(word, "the command line") for word in command],
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "packages": _versions(),
        "git": _git_of_sender()
        or {
            "commit": code_files.git_says("rev-parse", "HEAD") or None,
            "diff": shown,
            "untracked": code_files.git_says("ls-files", "--others", "--exclude-standard").splitlines(),
        },
        "withheld": [item._asdict() for item in left_out],
        "fingerprint": fingerprint,
    }
    fileio.write(run_dir.manifest, json.dumps(manifest, indent=2) + "\n", run_dir.path)
    if left_out:
        say_once(f"Withheld from the run folder: {'; '.join(dict.fromkeys(map(str, left_out)))}.")


def repeat_manifest(first: RunDir, run_dir: RunDir, fingerprint: str) -> None:
    """Write the manifest that the same command has just written for ``first``, with another fingerprint."""
    manifest = {**fileio.read_object(first.manifest), "fingerprint": fingerprint}
    fileio.write(run_dir.manifest, json.dumps(manifest, indent=2) + "\n", run_dir.path)


def add_data(run_dir: RunDir, data: Mapping[str, Any]) -> None:
    """Record in the manifest what the run's data has: images and classes of each split, and what was left out."""
    manifest = fileio.read_object(run_dir.manifest)
    fileio.write(run_dir.manifest, json.dumps({**manifest, "data": data}, indent=2) + "\n", run_dir.path)


def _diff() -> tuple[str, list[Withheld]]:
    """The changes since the commit, and the files left out of them: both names of a renamed file of credentials."""
    words = iter(code_files.git_says("diff", "--name-status", "-M", "-z", "HEAD").split("\0"))
    withheld: list[Withheld] = []
    places = [":/"]
    for status in words:
        names = [next(words, "")]
        if status.startswith(("R", "C")):  # renamed, or copied
            names.append(next(words, ""))
        if any(map(secrets.is_credentials, names)):
            withheld += map(withheld_by_name, names)
            places += map(":(top,exclude,literal){}".format, names)
    plain = ("--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    return code_files.git_says("diff", *plain, "HEAD", "--", *places), withheld


def _git_of_sender() -> dict[str, Any] | None:
    sent = fileio.read_object(code_files.INSTALLED / SENT).get("git")
    return sent if isinstance(sent, dict) else None


def origin(paths: Sequence[str]) -> tuple[str, str]:
    """Return this program's version in words, and the requirement by which pip installs the same elsewhere.

    Of a checkout git says it; else what pip has noted. Each is empty where it is not known.

    Args:
        paths: below `code_files.INSTALLED`. Where they are not as they were committed, nobody can install the same.
    """
    git = partial(code_files.git_says, "-C", str(code_files.INSTALLED))
    # Not `rev-parse --show-toplevel`: a venv may lie in a checkout of the user's.
    if (code_files.INSTALLED / ".git").exists():
        commit = git("rev-parse", "HEAD")
        if not commit:
            return "", ""
        if len(git("status", "--porcelain", "--branch", "--", *paths).splitlines()) != 1:
            return f"commit {commit} with changes of its own", ""
        # A commit that no remote branch holds was not pushed, as far as this clone knows.
        known = git("for-each-ref", "--contains", "HEAD", "--format=%(refname:lstrip=2)", "refs/remotes").split()
        urls: dict[str, None] = {}
        for name in known:
            urls[git("config", f"remote.{name.partition('/')[0]}.url")] = None
        return _origin_at(commit, urls)
    with suppress(metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        found = metadata.distribution(DISTRIBUTION)
        if os.path.realpath(str(found.locate_file("trainkit"))) == str(code_files.INSTALLED / "trainkit"):
            told = found.read_text("direct_url.json")
            if told is None:
                return f"{DISTRIBUTION} {found.version}", f"{DISTRIBUTION}=={found.version}"
            return _origin_at(fileio.parse(told)["vcs_info"]["commit_id"], [fileio.parse(told)["url"]])
    return "", ""


def _origin_at(commit: str, urls: Iterable[str]) -> tuple[str, str]:
    # Who pushes with a key reads what others read without one, if the place is public.
    for given in urls:
        url = re.sub(r"^(ssh://)?git@([^/:]+)[:/]", r"https://\2/", given)
        if len(url) <= LONGEST_URL and re.fullmatch(PUBLIC_URL, url) and _is_public(url):
            return f"commit {commit} of {url}", f"{DISTRIBUTION} @ git+{url}@{commit}"
    return f"commit {commit}", ""


def _is_public(url: str) -> bool:
    """True if anybody may read that repository: asked without this user's keys, settings and passwords."""
    alone = ("env", "HOME=/dev/null", "XDG_CONFIG_HOME=/dev/null", "GIT_TERMINAL_PROMPT=0", "GIT_ASKPASS=true", "git")
    with suppress(process.NoAnswer):
        return not process.ask([*alone, "ls-remote", url, "HEAD"], cwd=Path("/"), seconds=4).code
    return False


def _versions() -> dict[str, str]:
    """Return the versions of the packages that are installed, of those that matter to a result."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


_LOOKED_AT = 1000
"""Most entries of a data folder that a fingerprint lists; of a larger folder it takes the time of change."""


def fingerprint(config: Config, code: str) -> str:
    """Equal for two runs of the same configuration, code, data and number of ranks, wherever they train.

    Args:
        config: as the run stores it, with the absolute folder of its data.
        code: its `code_digest`.
    """
    settings = config.model_dump(mode="json", exclude={"launch"})
    ranks = config.launch.model_dump(mode="json", include={"nodes", "gpus_per_node", "ntasks_per_node"})
    text = json.dumps([settings, ranks, code, _data_state(Path(config.data.root))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def same_runs(prints: Iterable[str]) -> dict[str, list[RunDir]]:
    """Existing and unchanged runs of this user by fingerprint, oldest first.

    Reads one file, and the manifest of each run that it finds there.
    """
    wanted = set(prints)
    found: dict[str, list[RunDir]] = {}
    for mark, path in user_lists.marked():
        if mark in wanted and os.path.isfile(path / "config.yaml"):
            run = RunDir(path)
            if fileio.read_object(run.manifest).get("fingerprint") == mark:
                found.setdefault(mark, []).append(run)
    return found


def _data_state(root: Path) -> list[list[object]]:
    """Names, sizes and times in the data's folder; reading all of it would take too long."""
    try:
        with os.scandir(root) as entries:
            seen = sorted(entries, key=lambda entry: entry.name)
            if len(seen) > _LOOKED_AT:
                return [[len(seen), root.stat().st_mtime_ns]]
            return [
                [entry.name, entry.stat().st_size, entry.stat().st_mtime_ns]
                for entry in seen
                if not entry.name.startswith(".")
            ]
    except OSError:  # digits and synthetic have none
        return []
