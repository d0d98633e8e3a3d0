"""The proof that training works where it runs: `trainkit cluster check --train`, which is bench ``proof``.

Each arm passes, is refused, or fails. What trains is compared with what must learn the same: one rank on the CPU in
fp32. A training that was saved, and one that was killed, end with the very weights of one that was not. The figures of
larger models are what a device does here; nothing fails for being slow.
"""

import hashlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainkit.bench.base import Arm, powers_of_two
from trainkit.bench.driver import Driver
from trainkit.bench.rank import Order, Worker
from trainkit.bench.team import ArmFailedError
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.pickles import PYTHON_FLAGS
from trainkit.cluster.ranks import RankEnv
from trainkit.common import fileio
from trainkit.common.errors import RefusedError, RunFailedError, UserError
from trainkit.common.jsonl import finite
from trainkit.common.process import environment_alone
from trainkit.config.loading import load, to_yaml
from trainkit.data.order import derive_seed
from trainkit.diagnosis.causes import sentence_for
from trainkit.distributed.device import software
from trainkit.distributed.process_group import Distributed, local_part
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.clock import DATA
from trainkit.training.costs import mfu
from trainkit.training.train_state import TrainState
from trainkit.training.update import Updater

UPDATES = 20
"""Updates of a training whose losses are compared."""
_LIKE = 5e-3
"""Share by which a loss may differ from that of the CPU in fp32, for sums in another order."""
_ROUNDED = 0.03
"""The same for other number formats."""
_WAITS = 0.05
"""A share of the time from which on a figure says that training waited."""
_SAVED = 8
"""Updates before the checkpoint that a training goes on from."""
_KILLED_STEPS = 300
_KILLED_EVERY = 20
_CHILD_SECONDS = 240.0
_ON_CPU = 100.0
"""Times as long a CPU may take for the recipe."""
_FED_UPDATES = 20
_REDUCES = 10
_FEW = 10
"""Updates of a large model with many images each."""
_MANY = 40
"""Updates of a large model with few images each."""
_SAME_BITS = "train.deterministic=true"
"""For trainings whose weights are compared: a GPU's quickest kernels add in another order each time."""


class Prover(Worker):
    """One rank's part of the arms that bench ``proof`` adds."""

    def do_learn(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Losses of some updates."""
        parts = self._built(dist, order)
        return {"losses": self._updates(parts, 0, UPDATES)}

    def do_reference(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """The same on the CPU, by this rank alone."""
        return self.do_learn(Distributed(RankEnv.single(), torch.device("cpu")), order)

    def do_software(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Versions of what trains here."""
        return software(dist.device)

    def do_resume(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Check that a training that goes on from a checkpoint ends with the weights of one that was not interrupted.

        And if not, whether two that were not end alike.
        """
        if dist.is_main:
            fileio.make_folder(self.run / "proof", self.run)
        folder = self.run / "proof" / hashlib.sha256(str(order["overrides"]).encode()).hexdigest()[:8]
        order = {**order, "overrides": [*order["overrides"], _SAME_BITS]}
        parts = self._built(dist, order)
        checkpoints = Checkpoints(folder, keep=1, dist=dist, asynchronous=True)
        self._updates(parts, 0, _SAVED)
        state = {"precision": parts.precision.state_dict()}
        checkpoints.save(parts.model, parts.optimizer, step=_SAVED, state=state, extra=parts.further_tensors())
        self._updates(parts, _SAVED, UPDATES)
        checkpoints.settle()
        whole = _digest(parts)
        parts = self._built(dist, order)
        restored = checkpoints.restore(parts.model, parts.optimizer, into=parts.further_tensors())
        assert restored is not None
        parts.precision.load_state_dict(restored.state["precision"])
        self._updates(parts, _SAVED, UPDATES)
        checkpoints.close()
        if _digest(parts) == whole:
            return {"same": True, "steady": True}
        parts = self._built(dist, order)
        self._updates(parts, 0, UPDATES)
        return {"same": False, "steady": _digest(parts) == whole}

    def do_killed(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """The same of a process of its own, which is killed."""
        weights = []
        gpus = "auto"
        if dist.device.type == "cpu":
            gpus = "0"
        for name in ("whole", "killed"):
            settings = (
                f"launch.gpus_per_node={gpus}", f"train.max_steps={_KILLED_STEPS}", "monitor.loggers=[jsonl]",
                f"checkpoint.every_steps={_KILLED_EVERY}", "train.eval_every_epochs=1000", _SAME_BITS,
            )  # fmt: skip
            run = RunDir.create(self.run / "proof" / name, to_yaml(load("single", settings).config))
            if name == "killed" and not self._child(run, until=run.checkpoints / "latest"):
                what = "It ended before it could be killed."
                why = f"It makes {_KILLED_STEPS} updates that fast."
                raise RunFailedError(what, why=why, fix="Try it again beside other work.")
            self._child(run)
            content = fileio.read_bytes(run.checkpoints / "latest" / "model.safetensors", follow=True)
            weights.append(hashlib.sha256(content).hexdigest())
        return {"same": weights[0] == weights[1], "steady": True}

    def do_largest(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """The largest batch that fits, and with it the data of this arm, which may be another's."""
        self.do_data(dist, order)
        return super().do_largest(dist, order)

    def do_speed(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Images a second of a large model, and what share that is of what the devices could."""
        self.do_data(dist, order)
        parts = self._built(dist, order)
        made = self._trained(parts, order)
        speed = made["images"] / max(made["seconds"], 1e-9)
        waits = made["parts"].get(DATA, 0.0) / max(made["seconds"], 1e-9)
        return {"speed": speed, "mfu": mfu(parts, speed), "precision": parts.precision.name, "waits": waits}

    def do_recipe(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Test accuracy of the recipe that trains CIFAR-10 in the least time."""
        config = load("recipes/cifar10_fast", (f"data.root={self._config(order).data.root}", "monitor.loggers=[jsonl]"))
        began = time.perf_counter()
        run = RunDir.create(self.run / "proof" / "cifar10", to_yaml(config.config))
        patience = _ON_CPU if dist.device.type == "cpu" else 1.0
        self._child(run, patience=patience)
        (test,) = read_metrics(run, "test")[-1:]
        return {"acc1": test["acc1"], "took": time.perf_counter() - began}

    def _updates(self, parts: TrainState, start: int, stop: int) -> list[float | None]:
        """The loss of each update over all ranks."""
        update = Updater(parts, beat=self.beat)
        losses = list[float | None]()
        dist = parts.dist
        parts.model.train()
        with parts.batches(start, stop, workers=0) as batches:
            for position in range(start, stop):
                made = update(batches, lr=parts.lr_at(position), seed=derive_seed(parts.config.seed, position))
                mean = dist.all_reduce_sum(made.loss.detach().cpu().double()).item() / dist.world_size
                losses.append(finite(mean))
        return losses

    def _child(self, run: RunDir, until: Path | None = None, patience: float = 1.0) -> bool:
        """Train in a process of its own, to its end or until there is a file: then it is killed. Whether it was.

        ``patience``: how many times `_CHILD_SECONDS` it may take.

        Raises RunFailedError when it fails or takes too long, and RefusedError when it is refused.
        """
        deadline = time.monotonic() + patience * _CHILD_SECONDS
        pause = 0.2 if until is None else 0.02  # so that it has not ended before it is killed
        log = run.path / "child.log"
        command = [sys.executable, *PYTHON_FLAGS, "-m", "trainkit", "train", str(run.path)]
        with fileio.append(log, run.path) as out:
            child = subprocess.Popen(command, env=environment_alone(), stdout=out, stderr=out, start_new_session=True)
        try:
            while child.poll() is None:
                self.beat()
                if until is not None and until.exists():
                    return True
                if time.monotonic() > deadline:
                    why = f"It had {patience * _CHILD_SECONDS:.0f} s."
                    raise RunFailedError(
                        "A training in a process of its own took too long.", why=why, fix=f"See {log}."
                    )
                time.sleep(pause)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            said = fileio.read_end(log, 4096).strip().splitlines() or ["It said nothing."]
            if child.returncode in (UserError.exit_code, RefusedError.exit_code):  # in three lines
                raise RefusedError(said[-min(3, len(said))], why=said[-1], fix=f"See {log}.")
            cause = sentence_for("\n".join(said)) or "A training in a process of its own failed."
            raise RunFailedError(cause, why=said[-1], fix=f"See {log}.")
        return False


class Proof(Driver):
    """Rank 0: have each arm run once, and judge what comes of it."""

    def drive(self) -> str:
        arms = self.begin()
        (versions,) = self._ask(Arm("software", (), (0,), "software"))
        self._write("software", versions=versions)
        first = next((arm for arm in arms if arm.work == "learn"), None)
        if first is not None:
            try:
                (told,) = self._ask(Arm("reference", first.overrides, (0,), "reference"))
            except ArmFailedError as error:
                what = "Not even the CPU could train, so there is nothing to compare with."
                raise RunFailedError(what, why=f"{error}.", fix="Mend that first.") from None
            self._reference = told["losses"]
        for arm in arms:
            if self.stop.requested:
                self._end("It was told to stop.")
                return "stopped"
            began = time.monotonic()
            try:
                outcome, figure, why = self._proved(arm)
            except ArmFailedError as error:
                figure = ""
                why = explained(error)
                outcome = "refused" if error.refused else "failed"
            took = round(time.monotonic() - began, 1)
            self._write("proved", arm=arm.name, outcome=outcome, figure=figure, why=why, seconds=took)
        self._end("")
        self.writer.ended("COMPLETED")
        return "finished"

    def _proved(self, arm: Arm) -> tuple[str, str, str]:
        """Outcome, figure, and why."""
        told = self._ask(arm, updates=_updates_of(arm), sizes=powers_of_two(1 << 16))
        one = told[0]
        if arm.work == "learn":
            return self._judged(arm, one["losses"])
        if arm.work in ("resume", "killed"):
            if all(_of_each(told, "same")):
                return "passed", "the same weights", ""
            if all(_of_each(told, "steady")):
                return "failed", "", "it ended with different weights"
            return "failed", "", "two uninterrupted trainings end with different weights"
        if arm.work == "recipe":
            figure = f"{one['acc1']:.2f} % in {one['took']:.0f} s"
            if not one["acc1"] >= 94.0:  # as NaN
                return "failed", figure, "less than 94 %"
            return "passed", figure, ""
        return "passed", _figure(arm.work, told), ""

    def _judged(self, arm: Arm, losses: list[float | None]) -> tuple[str, str, str]:
        """A training against that on the CPU."""
        if None in losses:
            return "failed", "", "the loss is not a number"
        apart = 0.0
        for loss, other in zip(losses, self._reference, strict=True):
            if loss and other:
                apart = max(apart, abs(loss / other - 1))
        most = _LIKE if "train.precision=fp32" in arm.overrides else _ROUNDED
        figure = f"loss {losses[-1]:.4f}, apart {100 * apart:.2g} %"
        if not apart <= most:
            return "failed", figure, f"the losses differ from those of the CPU by more than {100 * most:.2g} %"
        return "passed", figure, ""


def _updates_of(arm: Arm) -> int | None:
    """Number of updates, or of exchanges, for an arm that is measured; None: its work needs none."""
    if arm.work == "speed" and arm.size < 100:
        return _FEW
    return {"reduce": _REDUCES, "feed": _FED_UPDATES, "speed": _MANY}.get(arm.work)


def _of_each(told: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """One field of every rank's answer."""
    return [answer[key] for answer in told]


def _figure(work: str, told: Sequence[Mapping[str, Any]]) -> str:
    """Return the figure of a work that is only measured, in words."""
    one = told[0]
    if work == "largest":
        return f"{min(_of_each(told, 'size'))} images, {one['peak_mb']:,.0f} MiB"
    if work == "reduce":
        return f"{one['bytes'] / max(_of_each(told, 'seconds')) / 1e9:.3g} GB/s"
    if work == "feed":
        return f"{one['extra']['loads_per_sec']:,.0f} images/s loaded"
    figure = f"{one['speed']:,.1f} images/s in {one['precision']}"
    if one["mfu"] is not None:
        figure += f", MFU {one['mfu']:.1f} %"
    if one["waits"] >= _WAITS:
        figure += f", {100 * one['waits']:.0f} % of the time waiting for data"
    return figure


def explained(error: ArmFailedError) -> str:
    """Why an arm failed: the sentence of the cause that its error shows, where one is known, and its words."""
    if error.refused:
        return str(error)
    cause = sentence_for(error.raised)
    if not cause:
        return str(error)
    return f"{cause} ({error})"


def _digest(parts: TrainState) -> str:
    """Digest of this rank's share of the weights."""
    content = hashlib.sha256()
    for tensor in parts.model.state_dict().values():
        content.update(local_part(tensor).detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
