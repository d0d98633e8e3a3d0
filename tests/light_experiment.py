"""A training without torch, for jobs whose training is not the point: ranks find it as trainkit.training.experiment.

All around it is real: the commands, the batch script, each rank's place, secret and signals, the lease and the record.
The ranks meet where they were told to, over a plain socket. A model of the user's is built and called once an update;
it must not import torch either (light_model.py). What is trained is a word, in which an update that is missing, done
twice or out of order is noticed: `trained`.
"""

import importlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from trainkit.cluster.ranks import NO_SECRET, RankEnv, Secret
from trainkit.cluster.signals import StopFlag, hand_back
from trainkit.common import jsonl
from trainkit.config.schema import Config
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.training.startup import Reports

STEPS = 8
"""Updates of a run without train.max_steps."""
PATIENCE_SECONDS = 300
PAUSE = "LIGHT_SECONDS"
"""In the environment: how long each update takes, where the model is none of the user's."""
STATE = "light.json"
HOOK = """\
import sys
import time
from importlib.util import spec_from_file_location


class Light:
    def find_spec(self, name, path=None, target=None):
        if name != "trainkit.training.experiment":
            return None
        time.sleep({seconds})
        return spec_from_file_location(name, {file!r})


sys.meta_path.insert(0, Light())
"""


def hook(folder: Path, seconds: float = 0.0) -> str:
    """Return the PYTHONPATH under which a submitted job's ranks train this way.

    Args:
        seconds: how long each rank takes to load what it trains with, as torch from a file system of the network.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK.format(file=__file__, seconds=seconds), encoding="utf-8")
    return str(folder)


def trained(steps: int) -> str:
    """What a run of so many updates has come to."""
    state = ""
    for step in range(1, steps + 1):
        state = _updated(state, step)
    return state


def _updated(state: str, step: int) -> str:
    return sha256(f"{state} {step}".encode()).hexdigest()


def run(
    config: Config,
    env: RankEnv,
    stop: StopFlag,
    *,
    open_run: Callable[[], Attempt],
    reports: Reports,
    secret: Secret = NO_SECRET,
) -> tuple[str, RunDir]:
    """As `trainkit.training.experiment.run`."""
    me, word = {**asdict(env), "host": socket.gethostname()}, sha256(secret.text.encode()).hexdigest()
    print(f"rank {env.rank} of {env.world_size}: {me['host']}, local rank {env.local_rank}", flush=True)
    port = env.master_port + ("TORCHELASTIC_RUN_ID" in os.environ)  # torchrun's own agents meet at the other one
    if not env.is_main:
        with _line_to(env.master_addr, port) as line:
            line.sendall(json.dumps([word, me]).encode() + b"\n")
            _model(config)
            outcome, run_dir = json.loads(line.makefile().readline() or "null") or _lost()
        if outcome == "preempted":
            hand_back(reports.node, env, stop.signals, step=None)
        return outcome, RunDir(Path(run_dir))
    with _met(env, port, me, word) as (ranks, tell):
        writer = open_run()
        outcome = _train(config, env, stop, writer, ranks, reports.beat)
        tell(outcome, str(writer.run.path))
    return outcome, writer.run


def _line_to(host: str, port: int) -> socket.socket:
    """A connection to rank 0, which may start later."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=PATIENCE_SECONDS)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _lost() -> Any:
    raise ConnectionError("rank 0 is gone")


@contextmanager
def _met(
    env: RankEnv, port: int, me: dict[str, Any], word: str
) -> Iterator[tuple[list[dict[str, Any]], Callable[[str, str], None]]]:
    """What each rank says of itself, and a way to tell the others how it ended."""
    ranks, lines = [me], []
    door: Any = socket.create_server(("", port), backlog=env.world_size) if env.world_size > 1 else None
    with door or nullcontext():
        for _ in range(env.world_size - 1):
            door.settimeout(PATIENCE_SECONDS)
            line, _ = door.accept()
            lines.append(line)
            said, rank = json.loads(line.makefile().readline())
            if said != word:
                raise PermissionError(f"rank {rank['rank']} does not know the secret of this run")
            ranks.append(rank)

        def tell(outcome: str, run: str) -> None:
            for line in lines:
                line.sendall(json.dumps([outcome, run]).encode() + b"\n")

        try:
            yield sorted(ranks, key=lambda rank: int(rank["rank"])), tell
        finally:
            for line in lines:
                line.close()


def _model(config: Config) -> Callable[[], Any]:
    module, _, name = config.model.name.partition(":")
    if not name:
        pause = float(os.environ.get(PAUSE, "0"))
        return lambda: time.sleep(pause)
    return getattr(importlib.import_module(module), name)(None, **config.model.options)  # type: ignore[no-any-return]


def _train(
    config: Config, env: RankEnv, stop: StopFlag, writer: Attempt, ranks: list[dict[str, Any]], beat: Callable[[], None]
) -> str:
    run, steps, model = writer.run, config.train.max_steps or STEPS, _model(config)
    file = run.path / STATE
    step, state = json.loads(file.read_text(encoding="utf-8")) if file.exists() else (0, "")
    (run.path / "ranks.json").write_text(json.dumps(ranks), encoding="utf-8")
    writer.started(
        step=step, total_steps=steps, steps_per_epoch=steps, world_size=env.world_size,
        hosts=list(dict.fromkeys(rank["host"] for rank in ranks)), device="cpu", precision="fp32", params=1,
    )  # fmt: skip
    while step < steps:
        model()
        step, state = step + 1, _updated(state, step + 1)
        beat()
        writer.may_write()
        record = {"step": step, "epoch": step / steps, "split": "train", "loss": 1 / step, "lr": 0.1}
        jsonl.append_jsonl(run.metrics, {"time": time.time(), **record})
        if step < steps and stop.requested:
            file.write_text(json.dumps([step, state]), encoding="utf-8")
            writer.saved(step)
            hand_back(writer, env, stop.signals, step=step)
            return "preempted"
    file.write_text(json.dumps([step, state]), encoding="utf-8")
    val = {"loss": 1 / steps, "acc1": 50.0}
    jsonl.append_jsonl(run.metrics, {"time": time.time(), "step": step, "epoch": 1.0, "split": "val", **val})
    summary = {
        "outcome": "finished", "steps": step, "epochs": 1.0, "best": {"val/acc1": 50.0}, "best_step": step, "val": val,
        "test": None, "train_seconds": 1.0, "images_per_sec": 1.0, "world_size": env.world_size, "device": "cpu",
        "precision": "fp32", "params": 1,
    }  # fmt: skip
    run.summary.write_text(json.dumps(summary), encoding="utf-8")
    writer.ended("COMPLETED", step=step)
    return "finished"
