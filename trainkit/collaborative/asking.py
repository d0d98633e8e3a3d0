"""What a swarm's run is configured as, asked by a process of its own: the one that asks may import hivemind later.

python -m trainkit.collaborative.asking      where the swarm is, in a line of standard input -> JSON
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import programs, reading
from trainkit.collaborative.entry import Entry, entry_of
from trainkit.config import yaml
from trainkit.config.loading import Loaded, load
from trainkit.errors import RunFailedError, TrainkitError, error_from_json
from trainkit.records import files

_SECONDS = 60.0


@dataclass(frozen=True)
class Run:
    """A collaborative run, as its creator publishes it."""

    name: str
    config: str
    """As YAML."""


def run_at(entry: Entry) -> Run:
    """The run of the swarm that ``entry`` leads to.

    Raises UserError when nobody answers.
    """
    what = "The swarm could not be asked for its settings."
    try:
        answer = programs.ask(
            [sys.executable, "-m", "trainkit.collaborative.asking"], text=f"{entry.text}\n", seconds=_SECONDS
        )
    except programs.NoAnswer as error:
        words = error.words.replace(sys.executable, "The process that asks")
        raise RunFailedError(
            what,
            why=f"{words}: this machine is overloaded, or its network is.",
            fix="Try again; `python -m jobs.swarm doctor` with the same token says what is in the way.",
        ) from None
    try:
        told: dict[str, Any] = reading.parse(answer.out)
    except ValueError:
        raise RunFailedError(
            what,
            why=(answer.err.strip().splitlines() or ["Nothing was said."])[-1][:200],
            fix="Try `python -m jobs.swarm status` with the same token; that traceback is ours to mend.",
        ) from None
    if "error" in told:
        raise error_from_json(told["error"])
    return Run(told["name"], told["config"])


def as_peer(
    run: Run,
    peers: Sequence[str],
    overrides: Sequence[str],
    *,
    flags: Mapping[str, tuple[Any, str]],
    env: Mapping[str, str],
    allow_code: bool,
) -> Loaded:
    """The configuration of a job that joins ``run``: its creator's, with resources and data of this machine.

    Raises UserError for overrides of what all peers have in common, and for code of the creator's own that is not
    allowed.
    """
    from trainkit.collaborative.settings import adapted, check_own

    own = [text for text in overrides if not text.startswith("launch.")]
    check_own(own)
    adapted(run.config, own, allow_code=allow_code)
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        file = Path(folder) / "hivemind-peer.yaml"
        files.write(file, run.config)
        values, _ = yaml.read(file)
        values = {key: value for key, value in values.items() if key != "launch"}  # of the creator's own site
        values["data"] = {key: value for key, value in values["data"].items() if key not in ("root", "workers")}
        values["collaborative"] = {**values["collaborative"], "initial_peers": list(peers), "port": 0}
        files.write(file, yaml.dump(values))
        return load(str(file), list(overrides), flags=flags, env=env)


def main() -> int:
    """Ask, and print the answer."""
    from trainkit.collaborative.messages import manifest_of, require_going_on
    from trainkit.collaborative.reader import open_reader

    try:
        entry = entry_of(sys.stdin.readline().split(), {}, name="ask")
        with open_reader(entry) as asked:
            _, manifest = manifest_of(asked.read().manifests, entry.addresses)
        require_going_on(manifest)
        print(json.dumps({"name": manifest.name, "config": manifest.config}))
    except TrainkitError as error:
        print(json.dumps({"error": error.to_json()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
