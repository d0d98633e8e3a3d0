"""The volunteers' notebook, executed as in Colab: by a kernel of its own, in a swarm on this machine."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from tests.runs import wait_until
from tests.swarm.conftest import PROJECT, TOKEN, Command, Commands
from trainkit.swarm.identity.invitations import Key, grant, write_token
from trainkit.swarm.peer import same_run
from trainkit.swarm.protocol.addresses import EXAMPLE

NOTEBOOK = PROJECT / "jobs" / "notebooks" / "join_colab.ipynb"
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
try:
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
finally:
    nbformat.write(notebook, sys.argv[2])
"""


def execution(
    commands: Commands, address: str, python: str = sys.executable, env: Mapping[str, str] | None = None
) -> tuple[Command, Path]:
    """Start to execute it, with the first cell filled in; the file that will have its outputs."""
    number = len(commands.started)
    filled, done = commands.folder / f"{number}.ipynb", commands.folder / f"{number}-done.ipynb"
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    (settings,) = (cell for cell in notebook["cells"] if cell["id"] == "settings")
    source = re.sub(r'^TOKEN = ""', f'TOKEN = "{address}"', "".join(settings["source"]), flags=re.M)
    # The creator of these tests has a model of its own.
    settings["source"] = source.replace('NAME = "colab"', 'NAME = "notebook"').replace("CODE = False", "CODE = True")
    filled.write_text(json.dumps(notebook), encoding="utf-8")
    out = commands.folder / f"{number}-notebook.txt"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [python, "-c", EXECUTE, str(filled), str(done)],
            cwd=commands.folder,
            env={
                **os.environ,
                **(env or {"PYTHONPATH": str(PROJECT)}),
                "HOME": str(commands.folder / "home"),
                "IPYTHONDIR": str(commands.folder / "ipython"),
                "OMP_NUM_THREADS": "1",
            },
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    command = Command(process, out)
    commands.started.append(command)
    return command, done


def kernel_of(command: Command) -> psutil.Process:
    def found() -> list[psutil.Process]:
        children = psutil.Process(command.process.pid).children(recursive=True)
        return [child for child in children if any("ipykernel" in word for word in child.cmdline())]

    return wait_until(found, 60, "the notebook's kernel")[0]


def ids_of_notebook(commands: Commands, address: str) -> set[str]:
    return {row["peer"] for row in commands.status(address)["peers"] if row["name"] == "notebook"}


def test_the_notebook_is_valid_and_joins_in_a_process_of_its_own() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert [cell["id"] for cell in notebook["cells"]] == ["about", "settings", "install", "join"]  # three to run
    cells = notebook["cells"][1:]
    assert [(cell["cell_type"], cell["outputs"], cell["execution_count"]) for cell in cells] == [("code", [], None)] * 3
    sources = ["".join(cell["source"]) for cell in cells]
    assert all(map(ast.parse, sources))
    for line in re.findall(r"^from trainkit.*", "\n".join(sources), re.MULTILINE):
        exec(line)  # what it takes of trainkit is still there
    # A token is no argument, which others see.
    assert "YOUR-" not in "".join(sources)  # but for the token there is nothing to fill in
    for text in (
        '[PYTHON, "-P", "-u", "-m", "jobs.join", "--name"',
        '"TRAINKIT_TOKEN": token',
        "start_new_session=True",
    ):
        assert text in sources[-1]


OWNER = Key(b"o" * 32)
KIT = "trainkit-vision @ git+https://git.example/anna/kit@"
PROJECT_FILE = """
build-system = {requires = [], build-backend = "setuptools.build_meta"}
project = {name = "trainkit-vision", version = "0.1.0", dependencies = ["torch>=99"]}
tool.setuptools.packages = []
"""


def installed(folder: Path, needs: list[str], answer: str, where: str = "venv") -> tuple[str, str]:
    """What the notebook says while it installs what a token names, by a Python of its own; and the commit that is then
    installed. Others find the repository at the address that the token names; here git is told that it is a folder.
    """
    own = grant(OWNER, "run", "anna", "volunteer", time.time() + 60.0)
    settings, install = ("".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"][1:3])
    script = settings.replace('TOKEN = ""', f'TOKEN = "{write_token(own, [EXAMPLE], needs)}"') + f"\n{install}"
    git = {"COUNT": "1", "KEY_0": f"url.file://{folder}/kit.insteadOf", "VALUE_0": "https://git.example/anna/kit"}
    env = {**os.environ, **{f"GIT_CONFIG_{key}": value for key, value in git.items()}, "HOME": str(folder)}
    env |= {"UV_NO_BUILD_ISOLATION": "1", "UV_NO_INDEX": "1", "UV_CACHE_DIR": str(folder / "cache")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"  # has uv
    env.pop("PYTHONPATH", None)
    python = str(folder / where / "bin" / "python")
    done = subprocess.run([python, "-c", script], input=answer, env=env, capture_output=True, text=True, cwd=folder)
    told = [*(folder / "trainkit").rglob("direct_url.json")]  # not in the machine's own Python
    return done.stdout + done.stderr, json.loads(told[0].read_text())["vcs_info"]["commit_id"] if told else ""


@pytest.mark.nightly
def test_the_notebook_installs_the_creators_commit_after_a_yes(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (place,) = (tmp_path / "venv").rglob("site-packages")
    (place / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "pyproject.toml").write_text(PROJECT_FILE)
    commits = []
    for message in ("one", "two"):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", message, "--allow-empty")):
            subprocess.run(["git", *words], cwd=tmp_path / "kit", check=True)
        rev = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path / "kit", check=True, capture_output=True)
        commits.append(rev.stdout.decode().strip())
    torch = f"torch=={same_run.installed()['torch']}.*"

    said, found = installed(tmp_path, [KIT + commits[0], torch], "no\n")
    assert (said.count(KIT + commits[0]), said.count(torch), found) == (1, 0, "")
    assert "Nothing was installed." in said
    for commit in commits:  # of one version, which pip takes for the same
        assert installed(tmp_path, [KIT + commit, torch], "yes\n")[1] == commit
    for here in (torch, "torch==1.0.*"):  # what the machine brings stays, whatever is declared; nothing to ask
        assert installed(tmp_path, [KIT + commits[1], here], "") == ("", commits[1])
    venv.create(tmp_path / "bare", with_pip=False)
    said, _ = installed(tmp_path, [torch], "", "bare")
    assert (
        said.strip() == "trainkit is missing here, and the token does not say where it is: ask the creator to push it."
    )
    said, _ = installed(tmp_path, [KIT + commits[1], "timm==0.0.1"], "yes\n")
    assert re.search("It cannot be installed: .* no version of timm==0.0.1", said.splitlines()[-1])
    for hostile in ("--index-url=https://evil.example", f"{KIT}main", f"{KIT}{commits[0]} -r x", "torch==1 --pre"):
        said, found = installed(tmp_path, [hostile], "yes\n")
        assert "This token names what no run needs." in said
        assert found == commits[1]


@pytest.mark.long
@pytest.mark.swarm
def test_the_notebook_joins_plots_and_comes_back_after_a_restart(commands: Commands) -> None:
    (commands.folder / "home").mkdir()
    creator, address = commands.create("collaborative.round_seconds=5", "collaborative.rounds=500")
    first, _ = execution(commands, address)
    creator.says("notebook has joined", 120)
    before = ids_of_notebook(commands, address)
    kernel_of(first).kill()  # "restart runtime"
    first.ends()

    second, done = execution(commands, address)
    runs = commands.folder / "home" / "trainkit" / "runs"

    def trained_again() -> bool:
        files = [run / "metrics.jsonl" for run in sorted(runs.glob("*-peer-*"))]
        return len(files) == 2 and files[1].is_file() and len(files[1].read_text().splitlines()) >= 2

    wait_until(trained_again, 120, f"two rounds after the restart: {second.output}")
    after = ids_of_notebook(commands, address)
    assert len(before) == 1
    assert after == before

    creator.process.send_signal(2)
    assert second.ends(120) == 0, second.output
    cells = {cell["id"]: cell for cell in json.loads(done.read_text(encoding="utf-8"))["cells"]}
    said = "".join("".join(item["text"]) for item in cells["join"]["outputs"] if item["output_type"] == "stream")
    assert "peers averaged" in said
    assert said.rstrip().endswith("Done.")
    assert any("image/svg+xml" in item.get("data", {}) for item in cells["join"]["outputs"])
    assert creator.ends() == 0


def machine(folder: Path, torch: str) -> str:
    """A Python that has this one's torch, as one of that version, but neither trainkit nor what its swarms need."""
    venv.create(folder, with_pip=False)
    (place,) = folder.glob("lib/python*/site-packages")
    left_out = ("trainkit", "__editable__", "hivemind", "timm", "grpc", "google", "protobuf", "wandb", "submitit")
    (source,) = {Path(path) for path in sys.path if (Path(path) / "torch").is_dir()}
    for item in source.iterdir():
        if not item.name.startswith((*left_out, "torch-")):
            (place / item.name).symlink_to(item)
    (told,) = source.glob("torch-*.dist-info")
    shutil.copytree(told, place / f"torch-{torch}.dist-info")
    text = (told / "METADATA").read_text()
    text = re.sub(r"^Version: .*", f"Version: {torch}", text, count=1, flags=re.MULTILINE)
    (place / f"torch-{torch}.dist-info" / "METADATA").write_text(text)
    return str(folder / "bin" / "python")


@pytest.mark.long
@pytest.mark.swarm
@pytest.mark.parametrize("torch", ["2.11.0+cu130", "99.0.0"])
def test_with_a_token_alone_it_averages_beside_another_torch(commands: Commands, torch: str) -> None:
    """It asks the package index for what trainkit declares."""
    python = machine(commands.folder / "machine", torch)
    packages = {path: path.lstat().st_mtime_ns for path in (commands.folder / "machine").rglob("*-packages/*")}
    kit, url = commands.folder / "kit", "https://git.example/anna/kit"
    subprocess.run(["git", "clone", "-q", str(PROJECT), str(kit)], check=True)
    subprocess.run(["git", "config", "remote.origin.url", url], cwd=kit, check=True)
    git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.file://{kit}.insteadOf", "GIT_CONFIG_VALUE_0": url}
    words = ("create", "hivemind", "--host", "127.0.0.1", "--name", "creator", "collaborative.rounds=500")
    creator = commands._start("jobs.swarm", *words, env={**git, "PYTHONPATH": str(kit)}, folder=kit)
    token = creator.says(TOKEN, 180)[1]

    git["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # has uv
    (commands.folder / "home" / "trainkit").mkdir(parents=True)
    notebook, done = execution(commands, token, python, git)
    creator.says("2 peers averaged", 600)
    creator.process.send_signal(2)
    assert notebook.ends(180) == 0, notebook.output
    said = done.read_text(encoding="utf-8")
    assert f"Installing, beside torch {torch}, torchvision {metadata.version('torchvision')}" in said
    assert f"torch: {'.'.join(torch.split('.')[:2])} here" in said
    assert "peers averaged" in said
    assert packages == {path: path.lstat().st_mtime_ns for path in (commands.folder / "machine").rglob("*-packages/*")}
    assert not [*(commands.folder / "home").rglob("site-packages/torch")]
    assert [*(commands.folder / "home").rglob("site-packages/hivemind")]
