"""Photos streamed from an S3 server on loopback, beside webdataset, litdata and mosaicml-streaming.

Each arm is a process of its own with two loader processes, which reads one epoch with nothing on its node's disk:
`arms/stream_peers.py`. All have the same photos in shards of as many, each in its own format, from one server (moto's,
in a process of its own), and must have seen each photo once, with the same mean and deviation of pixels. CPU seconds
are those of the arm's processes, not the server's; memory is the most that they have in sum (PSS, looked at four times
a second). All counts from when the library and its S3 client are imported.

The peers are installed into an environment of their own, which takes two minutes; or STREAM_PEERS names its python.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from tests.benchmarks.arms.stream_peers import SHARD
from tests.benchmarks.image_files import write_photos
from tests.benchmarks.measuring import CONTROL, Figure, Table, control_of, describe, ratios, take_turns
from tests.benchmarks.processes import PROJECT, environment
from tests.data.shards import write_shard
from trainkit.common.hosts import free_port
from trainkit.common.process import KEEP_FREED_MEMORY

ROUNDS = 5
PHOTOS = 4096
OURS = "trainkit"
PEERS = {"webdataset": "webdataset==1.0.2", "litdata": "litdata==0.2.76", "mosaic": "mosaicml-streaming==0.13.0"}
ARM = PROJECT / "tests" / "benchmarks" / "arms" / "stream_peers.py"
HEAD = ("library", "photos a second", "CPU of a photo", "memory of the node")
LOOK_SECONDS = 0.25
PATIENCE_SECONDS = 900.0
GOALS = {"photos a second": ("seconds", 1.5), "CPU of a photo": ("cpu", None), "memory": ("memory", 1.0)}
"""The fact of an epoch, and how many times as good as the best peer it is to be."""


@dataclass(frozen=True)
class Epoch:
    """What an arm took."""

    seconds: float
    cpu: float
    """Seconds of all its processes."""
    memory: float
    """MB of all its processes, at most."""


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table.

    Raises AssertionError where an arm has not seen each photo once, or gives other pixels.
    """
    photos = PHOTOS if rounds > 1 else 4 * SHARD
    with TemporaryDirectory(prefix="streams-") as name, served() as (url, env):
        root = Path(name)
        python = installed(root)
        if python is None:
            return [Figure("streams beside their peers", "", note="not measured: the peers cannot be installed")]
        kept = {**environment(root), **env}
        write(root, url, photos, python, kept)
        ceiling = bytes_a_second(root, url)
        moments: dict[str, torch.Tensor] = {}
        arms = {
            arm: partial(epoch, arm, sys.executable if arm == OURS else python, photos, root, kept, moments)
            for arm in (OURS, *PEERS)
        }
        measured = take_turns(arms, rounds)
    worst = max(float((other - moments[OURS]).abs().max()) for other in moments.values())
    assert worst <= 0.05, f"the arms do not give the same pixels: {moments}"
    return [table(measured, photos, ceiling)]


def table(measured: Mapping[str, Sequence[Epoch]], photos: int, ceiling: float) -> Table:
    """Medians of each library, and ours to the best peer of each round's."""
    rows = []
    for name, epochs in measured.items():
        if name != CONTROL:
            rate = statistics.median(photos / one.seconds for one in epochs)
            cpu = statistics.median(1000 * one.cpu / photos for one in epochs)
            memory = statistics.median(one.memory for one in epochs)
            shown = name if name == OURS else PEERS[name].replace("==", " ")
            rows.append([shown, f"{rate:,.0f}", f"{cpu:.2f} ms", f"{memory:,.0f} MB"])
    goals = []
    for what, (fact, at_least) in GOALS.items():
        taken = {name: [getattr(one, fact) for one in epochs] for name, epochs in measured.items()}
        found = {name: ratios(taken, name) for name in PEERS}
        best = min(found, key=lambda name: statistics.median(found[name]))
        met = None if at_least is None else statistics.median(found[best]) >= at_least
        goal = "" if at_least is None else f"at least {at_least:.2f} x"
        words = f"the best is {best}: {describe(found[best], '{:.2f} x'.format)}, control {control_of(taken):.3f}"
        goals.append(Figure(f"{what}, times as good as the best peer", words, control_of(taken), goal, met, 0.1))
    goals.append(Figure("what the server gives to plain ranged requests", f"{ceiling / 1e6:,.0f} MB/s"))
    return Table(HEAD, rows, goals)


def epoch(
    name: str, python: str, photos: int, root: Path, env: Mapping[str, str], moments: dict[str, torch.Tensor]
) -> Epoch:
    """Let an arm read all photos once."""
    with TemporaryDirectory(dir=root) as temporary:
        folder = Path(temporary) if name != OURS else root / "index"
        words = [python, str(ARM), name, str(photos), str(folder)]
        own = {"TMPDIR": temporary}
        if name == OURS:
            own |= KEEP_FREED_MEMORY  # as the ranks of a job have it
        with (root / "errors").open("w+") as errors, ThreadPoolExecutor(1) as pool:
            process = subprocess.Popen(
                words, env={**env, **own}, cwd=temporary, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            output = pool.submit(process.communicate, timeout=PATIENCE_SECONDS)
            memory = 0.0
            try:
                while not output.done():
                    memory = max(memory, proportional(process.pid))
                    time.sleep(LOOK_SECONDS)
            finally:
                process.kill()  # one that is late; its loader processes end with it
            errors.seek(0)
            assert process.returncode == 0, f"{name}: {errors.read()[-3000:]}"
        found = json.loads(output.result()[0].splitlines()[-1])
    assert sorted(found["numbers"]) == list(range(photos)), f"{name} has not seen each photo once"
    moments[name] = torch.tensor(found["moments"])
    return Epoch(found["seconds"], found["cpu"], memory)


def proportional(pid: int) -> float:
    """MB of a process and those it has started; of pages that several share, each has its part."""
    total = 0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for one in [parent, *parent.children(recursive=True)]:
            with suppress(OSError):
                found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{one.pid}/smaps_rollup").read_text(), re.MULTILINE)
                total += int(found[1]) if found else 0
    return total * 1024 / 1e6


def installed(root: Path) -> str | None:
    """The python of an environment with the peers; torch is the project's own. None where they cannot be had."""
    given = os.environ.get("STREAM_PEERS")
    if given:
        return given
    place = root / "peers"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "project.pth").write_text(str(Path(torch.__file__).parents[1]))
    done = subprocess.run([str(place / "bin" / "pip"), "install", "--quiet", *PEERS.values()], check=False)
    return str(place / "bin" / "python") if done.returncode == 0 else None


@contextmanager
def served() -> Iterator[tuple[str, dict[str, str]]]:
    """URL of an S3 server, and the environment of those that use it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    env = {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    env |= {"AWS_ACCESS_KEY_ID": "of-a-test", "AWS_SECRET_ACCESS_KEY": "of-a-test"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                    break
                time.sleep(0.1)
            yield url, env
        finally:
            server.kill()


def write(root: Path, url: str, photos: int, python: str, env: Mapping[str, str]) -> None:
    """The photos in the bucket, in the format of each; our index of them in ``root``."""
    files = write_photos(root / "photos", photos)
    for first in range(0, photos, SHARD):
        members: dict[str, bytes] = {}
        for number in range(first, first + SHARD):
            members |= {f"{number:06}.cls": str(number).encode(), f"{number:06}.jpg": files[number].read_bytes()}
        write_shard(root / "bucket" / "tars" / f"train-{first // SHARD:06}.tar", members)
    write_shard(root / "bucket" / "tars" / "val-000000.tar", members)
    subprocess.run([python, str(ARM), "write", str(photos), str(root)], env=env, check=True, stdout=sys.stderr)
    request("PUT", f"{url}/photos", b"")
    for file in (root / "bucket").rglob("*"):
        if file.is_file():
            # For everybody to read: webdataset asks without credentials.
            place = f"{url}/photos/{file.relative_to(root / 'bucket')}"
            request("PUT", place, file.read_bytes(), **{"x-amz-acl": "public-read"})
    code = "import sys; from pathlib import Path; from trainkit.data.registry import prepare_data; "
    code += "prepare_data('stream', Path(sys.argv[1]), [], print, {'url': 's3://photos/tars'})"
    subprocess.run([sys.executable, "-c", code, str(root / "index")], env=env, check=True, stdout=sys.stderr)


def request(method: str, url: str, content: bytes | None = None, **headers: str) -> bytes:
    asked = urllib.request.Request(url, content, {"Content-Type": "binary/octet-stream", **headers}, method=method)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return answer.read()  # type: ignore[no-any-return]


def bytes_a_second(root: Path, url: str) -> float:
    """Of the server, to four that ask it for nothing but parts of shards."""
    names = sorted(file.name for file in (root / "bucket" / "tars").iterdir())
    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda name: request("GET", f"{url}/photos/tars/{name}", Range="bytes=0-"), names)
        total = sum(map(len, parts))
    return total / (time.perf_counter() - began)
