"""The proof that training works where it runs: `trainkit cluster check --train`, which is bench ``proof``.

Each arm passes, is refused, or fails. What trains is compared with what must learn the same: one rank on the CPU in
fp32. A training that was saved, and one that was killed, end with the very weights of one that was not. The figures of
larger models are what a device does here; nothing fails for being slow.
"""

import hashlib
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainkit import fileio
from trainkit.bench.base import Arm
from trainkit.bench.run import ArmFailedError, Driver, Order, Worker
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.loading import load, to_yaml
from trainkit.data.base import derive_seed
from trainkit.diagnosis.causes import sentence_for
from trainkit.distributed.device import software
from trainkit.distributed.process_group import Distributed, local_part
from trainkit.errors import RefusedError, RunFailedError, UserError
from trainkit.process import environment_alone
from trainkit.ranks import RankEnv
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.build import TrainState
from trainkit.training.timing import DATA, mfu
from trainkit.training.update import Updater

UPDATES = 20
"""Of a training whose losses are compared."""
_LIKE, _ROUNDED = 5e-3, 0.03
"""By which share of it a loss may differ from that of the CPU in fp32: with other sums, and in other formats."""
_WAITS = 0.05
"""A share of the time from which on a figure says that training waited."""
_SAVED = 8
"""Updates before the checkpoint that a training goes on from."""
_KILLED_STEPS, _KILLED_EVERY = 300, 20
_CHILD_SECONDS = 240.0
_ON_CPU = 100.0
"""Times as long a CPU may take for the recipe."""
_FED_UPDATES, _REDUCES = 20, 10
_FEW, _MANY = 10, 40
"""Updates of a large model, with few images each and with many."""
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
        """Whether a training that goes on from a checkpoint ends with the weights of one that was not interrupted.

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
        checkpoints.save(
            parts.model, parts.optimizer, step=_SAVED, state=state, best_step=None, extra=parts.further_tensors()
        )
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
        weights, gpus = [], 0 if dist.device.type == "cpu" else "auto"
        for kills in (False, True):
            folder = self.run / "proof" / ("killed" if kills else "whole")
            settings = (
                f"launch.gpus_per_node={gpus}", f"train.max_steps={_KILLED_STEPS}", "monitor.loggers=[jsonl]",
                f"checkpoint.every_steps={_KILLED_EVERY}", "train.eval_every_epochs=1000", _SAME_BITS,
            )  # fmt: skip
            run = RunDir.create(folder, to_yaml(load("single", settings).config))
            if kills and not self._child(run, until=run.checkpoints / "latest"):
                what, why = "It had ended before it could be killed.", f"It makes {_KILLED_STEPS} updates that fast."
                raise RunFailedError(what, why=why, fix="Try it again beside other work.")
            self._child(run)
            content = fileio.read_bytes(run.checkpoints / "latest" / "model.safetensors", follow=True)
            weights.append(hashlib.sha256(content).hexdigest())
        return {"same": weights[0] == weights[1]}

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
        self._child(run, patience=_ON_CPU if dist.device.type == "cpu" else 1.0)
        (test,) = read_metrics(run, "test")[-1:]
        return {"acc1": test["acc1"], "took": time.perf_counter() - began}

    def _updates(self, parts: TrainState, start: int, stop: int) -> list[float | None]:
        """The loss of each update over all ranks."""
        update, losses, dist = Updater(parts, beat=self.beat), list[float | None](), parts.dist
        parts.model.train()
        with parts.batches(start, stop, workers=0) as batches:
            for position in range(start, stop):
                made = update(batches, lr=parts.lr_at(position), seed=derive_seed(parts.config.seed, position))
                mean = dist.all_reduce_sum(made.loss.detach().cpu().double()).item() / dist.world_size
                losses.append(mean if math.isfinite(mean) else None)
        return losses

    def _child(self, run: RunDir, until: Path | None = None, patience: float = 1.0) -> bool:
        """Train in a process of its own, to its end or until there is a file: then it is killed. Whether it was.

        ``patience``: how many times `_CHILD_SECONDS` it may take.

        Raises RunFailedError when it fails or takes too long, and RefusedError when it is refused.
        """
        deadline, log = time.monotonic() + patience * _CHILD_SECONDS, run.path / "child.log"
        command = [sys.executable, "-m", "trainkit", "train", str(run.path)]
        with fileio.append(log, run.path) as out:
            child = subprocess.Popen(command, env=environment_alone(), stdout=out, stderr=out, start_new_session=True)
        try:
            while child.poll() is None:
                self.beat()
                if until is not None and until.exists():
                    return True
                if time.monotonic() > deadline:
                    what, why = "A training of its own took too long.", f"It had {patience * _CHILD_SECONDS:.0f} s."
                    raise RunFailedError(what, why=why, fix=f"See {log}.")
                time.sleep(0.02 if until is not None else 0.2)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
            child.wait()
        if child.returncode:
            said = fileio.read_end(log, 4096).strip().splitlines() or ["It said nothing."]
            if child.returncode in (UserError.exit_code, RefusedError.exit_code):  # in three lines
                raise RefusedError(said[-min(3, len(said))], why=said[-1], fix=f"See {log}.")
            cause = sentence_for("\n".join(said)) or "A training of its own failed."
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
                outcome, figure, why = "refused" if error.refused else "failed", "", explained(error)
            took = round(time.monotonic() - began, 1)
            self._write("proved", arm=arm.name, outcome=outcome, figure=figure, why=why, seconds=took)
        self._end("")
        self.writer.ended("COMPLETED")
        return "finished"

    def _proved(self, arm: Arm) -> tuple[str, str, str]:
        """Outcome, figure, and why."""
        told = self._ask(arm, **self._asked(arm))
        one = told[0]
        if arm.work == "learn":
            return self._judged(arm, one["losses"])
        if arm.work in ("resume", "killed"):
            if all(each["same"] for each in told):
                return "passed", "the same weights", ""
            steady = all(each.get("steady", True) for each in told)
            why = "it ended with other weights" if steady else "two trainings end with other weights, uninterrupted"
            return "failed", "", why
        if arm.work == "largest":
            return "passed", f"{min(each['size'] for each in told)} images, {one['peak_mb']:,.0f} MiB", ""
        if arm.work == "reduce":
            return "passed", f"{one['bytes'] / max(each['seconds'] for each in told) / 1e9:.3g} GB/s", ""
        if arm.work == "feed":
            return "passed", f"{one['extra']['loads_per_sec']:,.0f} images/s loaded", ""
        if arm.work == "recipe":
            is_good = one["acc1"] >= 94.0
            said = f"{one['acc1']:.2f} % in {one['took']:.0f} s"
            return ("passed", said, "") if is_good else ("failed", said, "less than 94 %")
        share = "" if one["mfu"] is None else f", MFU {one['mfu']:.1f} %"
        waits = f", {100 * one['waits']:.0f} % of it waiting for data" if one["waits"] >= _WAITS else ""
        return "passed", f"{one['speed']:,.1f} images/s in {one['precision']}{share}{waits}", ""

    @staticmethod
    def _asked(arm: Arm) -> Mapping[str, Any]:
        asked: dict[str, Mapping[str, Any]] = {
            "largest": {"sizes": [1 << power for power in range(1, 17)]}, "reduce": {"updates": _REDUCES},
            "feed": {"updates": _FED_UPDATES}, "speed": {"updates": _MANY if arm.size >= 100 else _FEW},
        }  # fmt: skip
        return asked.get(arm.work, {})

    def _judged(self, arm: Arm, losses: list[float | None]) -> tuple[str, str, str]:
        """A training against that on the CPU."""
        if None in losses:
            return "failed", "", "the loss is not a number"
        pairs = zip(losses, self._reference, strict=True)
        apart = max(abs(loss / other - 1) for loss, other in pairs if loss and other)
        most = _LIKE if "train.precision=fp32" in arm.overrides else _ROUNDED
        figure = f"loss {losses[-1]:.4f}, apart {100 * apart:.2g} %"
        if not apart <= most:
            return "failed", figure, f"the losses are further apart from those of the CPU than {100 * most:.2g} %"
        return "passed", figure, ""


def explained(error: ArmFailedError) -> str:
    """Why an arm failed: the sentence of the cause that its error shows, where one is known, and its words."""
    cause = "" if error.refused else sentence_for(error.raised)
    return f"{cause} ({error})" if cause else str(error)


def _digest(parts: TrainState) -> str:
    """Of this rank's share of the weights."""
    content = hashlib.sha256()
    for tensor in parts.model.state_dict().values():
        content.update(local_part(tensor).detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
