"""What a peer writes into its run folder: the same records as any other run, so that every verb works on it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from trainkit.checkpoint import files
from trainkit.checkpoint.record import BrokenCheckpointError
from trainkit.collaborative.outer import OuterState
from trainkit.collaborative.rounds import Box, Peer
from trainkit.config.schema import Config
from trainkit.data.base import Samples
from trainkit.distributed.device import device_name, peak_memory_mb
from trainkit.errors import RunFailedError
from trainkit.monitor.base import Logger
from trainkit.records.events import append_event
from trainkit.records.rundir import RunDir
from trainkit.training.evaluate import evaluate
from trainkit.training.loop import Progress

# Validation and saving may take this share of a round, on average; a long one is made in fewer rounds.
_SHARE_FOR_RECORDS = 0.25
_SAY = Callable[[str], None]


class RunKeeper:
    """Metrics of every round; of the peer that answers for the run (``judges``) also validation and checkpoints."""

    def __init__(self, run_dir: RunDir, config: Config, metrics: Logger, *, judges: bool, say: _SAY) -> None:
        self.run_dir, self.config, self.metrics, self.judges, self.say = run_dir, config, metrics, judges, say
        self.progress = Progress()
        self.most_peers = 1
        self._known: dict[str, str] = {}
        self._skip = 0
        self.peer: Peer | None = None  # set once it is built: the two know each other

    def after_round(self, box: Box) -> None:
        """Record a round, and judge the model that came out of it if that is due."""
        peer, progress = self._peer(), self.progress
        progress.step = peer.step
        progress.images += box.samples
        progress.train_seconds += box.seconds
        self.most_peers = max(self.most_peers, box.result.group)
        where = self._where(box.index)
        rate = box.samples / box.seconds if box.seconds else None
        if box.samples:
            numbers = {key: box.metrics[key] for key in ("loss", "acc1", "acc5")}
            swarm = {"peers": max(1, box.result.group), "swarm_images_per_sec": round(box.result.samples_per_sec, 2)}
            speed = {"lr": box.lr, "images_per_sec": None if rate is None else round(rate, 2)}
            self.metrics.log({**where, "split": "train", **numbers, **speed, **swarm})
        words = [f"round {box.index + 1}/{peer.clock.count}", _who(box)]
        if box.samples:
            words.append(f"loss {box.metrics['loss']:.4f}")
            words.append(f"{rate or 0.0:,.0f} images/s here")
        if box.result.drifted:
            words.append("behind the others: taking over their state")
        if self.judges:
            words += self._judge(box.index, where)
            self._note_arrivals()
        self.say("  ".join(words))

    def finish(self, outcome: str, *, test: bool = True) -> None:
        """Test metrics of the best model, if wanted, and ``summary.json``."""
        peer, progress = self._peer(), self.progress
        index = min(peer.outer.round, peer.clock.count) - 1
        where = self._where(index)
        if not self.judges:  # a peer that joined validates once: the model that all of them end with
            progress.val = self._evaluate(peer.splits.val)
            progress.best = progress.val[self.config.checkpoint.best.removeprefix("val/")]
            progress.best_step = progress.step
            self.metrics.log({**where, "split": "val", **progress.val})
            self._save(max(index, 0))
        tested: dict[str, float] = {}
        if test:
            best = progress.best_step
            if best is not None and best != progress.step and files.path_of(self.run_dir.checkpoints, best).is_dir():
                _load_weights(peer.model, files.read_tensors(self.run_dir.checkpoints, best, "model"))
            tested = self._evaluate(peer.splits.test)
            self.metrics.log({**where, "split": "test", **tested})
        self._write_summary(outcome, tested, index + 1)

    def _judge(self, index: int, where: dict[str, Any]) -> list[str]:
        peer, progress = self._peer(), self.progress
        if self._skip > 0 and index + 1 < peer.clock.count:
            self._skip -= 1
            return []
        began = time.monotonic()
        result = self._evaluate(peer.splits.val)
        name = self.config.checkpoint.best.removeprefix("val/")
        progress.val, progress.validated_step = result, progress.step
        value = result[name]
        best = progress.best
        if best is None or (value < best if name == "loss" else value > best):
            progress.best, progress.best_step = value, progress.step
        self.metrics.log({**where, "split": "val", **result})
        self._save(index)
        share = (time.monotonic() - began) / (peer.clock.seconds * _SHARE_FOR_RECORDS)
        self._skip = max(0, math.ceil(share) - 1)
        return [f"val loss {result['loss']:.4f}  val acc1 {result['acc1']:.2f} %"]

    def _save(self, index: int) -> None:
        """A checkpoint of the weights that the peers have in common; the model holds them right after a round."""
        peer, progress, folder = self._peer(), self.progress, self.run_dir.checkpoints
        state = {
            "progress": asdict(progress),
            "precision": peer.precision.state_dict(),
            "world_size": 1,
            "round": index + 1,
            "age": peer.outer.age,
        }
        try:
            files.write(
                folder,
                progress.step,
                {
                    "model": {name: value.detach().cpu().clone() for name, value in peer.model.state_dict().items()},
                    "outer": {"theta": peer.outer.theta, "momentum": peer.outer.momentum},
                },
                state,
            )
            if progress.best_step is not None and files.path_of(folder, progress.best_step).is_dir():
                files.point(folder, "best", progress.best_step)
            files.prune(folder, self.config.checkpoint.keep)
        except OSError as error:
            raise RunFailedError(
                f"The checkpoint of round {index + 1} could not be written.",
                why=f"{error.strerror}: {error.filename}.",
                fix="Make room and start again.",
            ) from None
        append_event(self.run_dir, "saved", step=progress.step, round=index + 1)

    def _note_arrivals(self) -> None:
        peer = self._peer()
        now = {key: record.name for key, record in peer.watch.others(time.time() - 3 * peer.clock.seconds).items()}
        for key in now.keys() - self._known.keys():
            append_event(self.run_dir, "peer_joined", peer=key, name=now[key])
            self.say(f"  {now[key]} has joined")
        for key in self._known.keys() - now.keys():
            append_event(self.run_dir, "peer_left", peer=key, name=self._known[key])
            self.say(f"  {self._known[key]} has left")
        self._known = now

    def _evaluate(self, samples: Samples) -> dict[str, float]:
        peer = self._peer()
        result = evaluate(
            peer.model,
            samples,
            peer.splits,
            batch_size=peer.micro_batch_size,
            workers=peer.workers,
            precision=peer.precision,
            dist=peer.dist,
        )
        assert result is not None
        return result

    def _where(self, index: int) -> dict[str, Any]:
        peer = self._peer()
        epoch = self.progress.images / max(1, len(peer.splits.train))
        return {"step": self.progress.step, "epoch": round(epoch, 4), "round": index + 1}

    def _write_summary(self, outcome: str, test: dict[str, float], rounds: int) -> None:
        peer, progress = self._peer(), self.progress
        seconds = progress.train_seconds
        summary = {
            "outcome": outcome,
            "steps": progress.step,
            "epochs": round(progress.images / max(1, len(peer.splits.train)), 4),
            "best": {self.config.checkpoint.best: progress.best},
            "best_step": progress.best_step,
            "val": progress.val,
            "test": test,
            "train_seconds": round(seconds, 3),
            "images_per_sec": round(progress.images / seconds, 2) if seconds else None,
            "world_size": 1,
            "micro_batch_size": peer.micro_batch_size,
            "precision": peer.precision.name,
            "skipped_steps": peer.precision.skipped_steps,
            "device": device_name(peer.dist.device),
            "params": peer.outer.num_parameters,
            "max_memory_mb": peak_memory_mb(peer.dist.device),
            "rounds": rounds,
            "most_peers": self.most_peers,
        }
        partial = self.run_dir.summary.with_name(".summary.json.partial")
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.run_dir.summary)

    def _peer(self) -> Peer:
        assert self.peer is not None
        return self.peer


class NoKeeper:
    """Of a rank that leaves the records to rank 0."""

    def after_round(self, box: Box) -> None: ...


def restore(run_dir: RunDir, outer: OuterState, keeper: RunKeeper) -> int:
    """Go on from the newest whole checkpoint, if there is one. The round to go on with."""
    folder = run_dir.checkpoints
    for step in reversed(files.steps(folder)):
        try:
            state = files.verified(folder, step).state
            tensors = files.read_tensors(folder, step, "outer")
            outer.load(tensors["theta"], tensors["momentum"], int(state["round"]), float(state["age"]))
        except (BrokenCheckpointError, KeyError, ValueError) as error:
            keeper.say(f"Checkpoint {files.path_of(folder, step)} is broken: {error}. Trying the one before it.")
            continue
        keeper.progress = Progress(**state["progress"])
        return outer.round
    return 0


def _load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    model.load_state_dict(weights)


def _who(box: Box) -> str:
    if box.result.used == "average":
        return f"{box.result.group} peers averaged"
    if box.peers == 1:
        return "alone"
    return f"went on alone ({box.result.why})"
