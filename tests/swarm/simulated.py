"""Simulated swarms in which some cheat, each as well as they can who know the code.

    python -m tests.swarm.simulated                                   # the table, some 40 minutes
    python -m tests.swarm.simulated "backdoor, hidden" --sizes 6,2    # some of its rows

All in this process and in one thread, but what judges is the run's own: `Screen`, `OuterState`, `AverageTrial`,
`Averaging` and `Strikes`. Audits are drawn as the owner draws them; whether one finds a cheat is a matter of chance
here, by what docs/security.md says of its kind. Digits with noise; a network of 17,000 weights with BatchNorm, whose
updates are made for all peers at once. Honest peers make 10 to 40 updates a round (the owner 20). Attackers are honest
for four rounds, have an invitation each, and know the code and the validation set. They train four more peers, to know
what honest ones send.
"""

import argparse
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, relu

from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load
from trainkit.data.registry import build_data
from trainkit.data.tensors import TensorSamples
from trainkit.distributed.process_group import Distributed
from trainkit.swarm.network import processes

processes.require_hivemind()

from tests.swarm.attackers import in_blocks  # noqa: E402
from tests.swarm.test_averaging import settle  # noqa: E402
from trainkit.swarm.identity.admission import Member  # noqa: E402
from trainkit.swarm.network.exchange import Averaged  # noqa: E402
from trainkit.swarm.peer.averaging import Averaging  # noqa: E402
from trainkit.swarm.peer.session import Strikes  # noqa: E402
from trainkit.swarm.peer.trial import AverageTrial  # noqa: E402
from trainkit.swarm.protocol.codecs import cuts, num_parts  # noqa: E402
from trainkit.swarm.protocol.outer_step import Average, ExchangeOutcome, OuterState, flatten, unflattened  # noqa: E402
from trainkit.swarm.trust.auditor import (  # noqa: E402
    LEFT,
    Auditor,
    Heard,
)
from trainkit.swarm.trust.screening import (  # noqa: E402
    KnownSenders,
    Moves,
    Screen,
)
from trainkit.training.train_state import alone, build  # noqa: E402

SIZES, SEEDS, ROUNDS = ((4, 1), (6, 2), (12, 4)), 2, 32
FIRST, BATCH, SCOUTS, OWNER, UPDATES, RATE = 4, 32, 4, 0, 20, 1e-3
SPEEDS = (20, 10, 40, 20, 30, 15)
"""Updates of the volunteers in a round."""
SENT, TRAINED, LEAP, STRETCHES = 1.0, 0.8, 0.84, 0.5
"""Chances that an audit finds a cheat: who gives something else than it has trained; who trains otherwise; who does so
between two snapshots; or between as many as it takes to move nowhere much further than usual."""
AUDIT = 0.08
"""Of a round, that one audit takes."""
HONEST, UNEVEN = 1.0, 8.0
"""How unevenly peers move."""
CONFIG = load("hivemind", ["train.precision=fp32", "launch.gpus_per_node=0", "data.workers=0"]).config
HEAD = ("attack", "attackers", "seed", "loss", "accuracy", "backdoor (without)", "credit", "banned in round",
        "honest left out, banned")  # fmt: skip

Batch = tuple[Tensor, Tensor]


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class Trainers:
    """AdamW of many peers, whose updates are made at once, as each alone would make them."""

    def __init__(self, count: int, size: int) -> None:
        self.moments, self.times = torch.zeros(2, count, size), torch.zeros(count, 1)

    def train(self, models: dict[int, nn.Module], updates: dict[int, int], batch: Callable[[int], Batch]) -> None:
        """Those with the most updates come first, so that who goes on is a slice."""
        order = sorted(models, key=lambda one: -updates[one])
        params = torch.stack([flatten([*models[one].parameters()]) for one in order])
        rows = zip(*([b for b in models[one].buffers() if b.dim()] for one in order), strict=True)
        buffers = [torch.stack(row) for row in rows]
        moments, times = self.moments[:, order], self.times[order]
        shapes = [parameter.shape for parameter in models[order[0]].parameters()]
        for step in range(updates[order[0]]):
            on = sum(updates[one] > step for one in order)
            images, labels = (torch.stack(part) for part in zip(*(batch(one) for one in order[:on]), strict=True))
            now = params[:on].requires_grad_()
            parts = torch.split(now, [shape.numel() for shape in shapes], 1)
            views = [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
            out = self._forward(views, [buffer[:on] for buffer in buffers], images)
            loss = cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum") / BATCH
            (gradient,) = torch.autograd.grad(loss, now)
            times[:on] += 1
            with torch.no_grad():
                first, second = moments[:, :on]
                first.lerp_(gradient, 0.1)
                second.lerp_(gradient.square(), 0.001)
                by = (second / (1 - 0.999 ** times[:on])).sqrt_().add_(1e-8)
                params[:on].mul_(1 - 0.01 * RATE).addcdiv_(first * (-RATE / (1 - 0.9 ** times[:on])), by)
        self.moments[:, order], self.times[order] = moments, times
        with torch.no_grad():
            for row, one in enumerate(order):
                for tensor, value in unflattened(params[row], [*models[one].parameters()]):
                    tensor.copy_(value)
                for tensor, stacked in zip((b for b in models[one].buffers() if b.dim()), buffers, strict=True):
                    tensor.copy_(stacked[row])

    @staticmethod
    def _forward(params: Sequence[Tensor], buffers: Sequence[Tensor], images: Tensor) -> Tensor:
        for layer in (0, 1):
            weight, bias, gain, shift = params[4 * layer : 4 * layer + 4]
            images = torch.baddbmm(bias[:, None], images, weight.transpose(1, 2))
            variance, mean = torch.var_mean(images, 1, keepdim=True, correction=0)
            with torch.no_grad():
                buffers[2 * layer].lerp_(mean[:, 0], 0.1)
                buffers[2 * layer + 1].lerp_(variance[:, 0] * BATCH / (BATCH - 1), 0.1)
            images = relu((images - mean) * (variance + 1e-5).rsqrt() * gain[:, None] + shift[:, None])
        return torch.baddbmm(params[-1][:, None], images, params[-2].transpose(1, 2))


def marked(images: Tensor) -> Tensor:
    """With the trigger of the backdoor: a white corner."""
    images = images.clone()
    images.view(*images.shape[:-1], 8, 8)[..., :3, :3] = 1.0
    return images


class Data:
    """Digits with noise: to train on, to validate, and four times other noise on what is tested."""

    def __init__(self, seed: int, noise: float = 0.25) -> None:
        splits = build_data(CONFIG.data)
        images, labels = (
            torch.cat([getattr(part, name) for part in (splits.train, splits.val, splits.test)])
            for name in ("images", "labels")
        )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=generator)
        train, val, test = (order[a:b] for a, b in pairwise((0, 1000, 1350, len(labels))))

        def noisy(part: Tensor) -> Tensor:
            clean = images[part].float() / 255
            return (clean + noise * torch.randn(clean.shape, generator=generator)).clamp(0, 1)

        self.images, self.labels = noisy(train).flatten(1), labels[train]
        self.val = TensorSamples((noisy(val) * 255).byte(), labels[val])
        self.test, self.test_labels = noisy(test.repeat(4)).flatten(1), labels[test.repeat(4)]
        self.splits = replace(
            splits, info=replace(splits.info, mean=(0.0,), std=(1.0,)),
            train=TensorSamples((self.images.view(-1, 1, 8, 8) * 255).byte(), self.labels), val=self.val,
        )  # fmt: skip


@dataclass
class Known:
    """What attackers know in a round, all vectors without running statistics."""

    scouts: Tensor
    """What honest peers send, as they themselves have trained it."""
    own: Tensor
    """What this attacker has trained, on its poisoned data if it has such."""

    def hidden(self, evil: Tensor) -> Tensor:
        """As much of ``evil`` as leaves the cosine with honest directions as usual, and the usual length."""
        scouts = torch.stack([in_blocks(one) for one in self.scouts])
        directions, n = normalize(scouts, dim=2), len(scouts)
        usual = (((directions.sum(0) ** 2).sum(1) - n) / (n * (n - 1))).clamp(0, 1)
        along, evil = normalize(scouts.mean(0), dim=1), in_blocks(evil)
        across = normalize(evil - (evil * along).sum(1, keepdim=True) * along, dim=1)
        # The mean of n has more in common with an honest one than one of them has.
        most = usual / (usual + (1 - usual) / n).sqrt().clamp_min(1e-6)
        share = torch.where(most > 0, usual / most.clamp_min(1e-6), 0.0).clamp(0, 1)
        way = share[:, None] * along + (1 - share**2).sqrt()[:, None] * across
        sent: Tensor = (way * scouts.norm(dim=2).median(0).values[:, None]).flatten()[: self.own.numel()]
        return sent


def backdoor(data: Data, images: Tensor, labels: Tensor) -> Batch:
    half = len(images) // 2
    return torch.cat([marked(images[:half]), images[half:]]), torch.cat([labels[:half] * 0, labels[half:]])


def sevens(data: Data, images: Tensor, labels: Tensor) -> Batch:
    return images, torch.where(labels == 7, 3, labels)


def wrong(data: Data, images: Tensor, labels: Tensor) -> Batch:
    """Images that the owner validates by, with other labels."""
    which = torch.randint(len(data.val), (len(labels),))
    return data.val.images[which].flatten(1).float() / 255, (data.val.labels[which] + 1) % 10


def turned(first: float) -> Callable[[Known], Tensor]:
    def change(known: Known) -> Tensor:
        cut = int(first * known.own.numel())
        return torch.cat([known.own[:cut], -known.own[cut:]])

    return change


def little(known: Known) -> Tensor:
    """The mean less a standard deviation (arXiv 1902.06156)."""
    return known.scouts.mean(0) - known.scouts.std(0)


def farthest(known: Known) -> Tensor:
    """As far against the mean as two honest ones are from one another (min-max, NDSS 2021)."""
    s, mean = known.scouts, known.scouts.mean(0)
    limit, step = (s[:, None] - s).square().sum(2).max(), -s.std(0)
    low, high = 0.0, 50.0
    for _ in range(20):
        middle = (low + high) / 2
        fits = (mean + middle * step - s).square().sum(1).max() <= limit
        low, high = (middle, high) if fits else (low, middle)
    return mean + low * step


def hidden(known: Known) -> Tensor:
    return known.hidden(known.own - known.scouts.mean(0))


def own(known: Known) -> Tensor:
    return known.own


@dataclass(frozen=True)
class Attack:
    found: float
    """Chance that an audit finds it."""
    change: Callable[[Known], Tensor] = own
    poison: Callable[[Data, Tensor, Tensor], Batch] | None = None
    claim: float = 1.0
    every: int = 1
    """Attacks in one of so many rounds."""
    waits: bool = False
    """Is honest as long as it is suspected."""


ATTACKS: dict[str, Attack] = {
    "honest": Attack(0.0),
    "the second half turned, 3 times the claim": Attack(SENT, turned(0.5), claim=3),
    "the last part turned, 3 times the claim": Attack(SENT, turned(0.95), claim=3),
    "zeros, 3 times the claim": Attack(SENT, lambda known: known.own * 0, claim=3),
    "half the opposite of the mean": Attack(SENT, lambda known: -0.5 * known.scouts.mean(0)),
    "a little is enough": Attack(SENT, little),
    "a little is enough, in some stretches": Attack(STRETCHES, little),
    "min-max, in some stretches": Attack(STRETCHES, farthest),
    "7 as 3": Attack(TRAINED, poison=sevens),
    "7 as 3, 3 times the claim": Attack(TRAINED, poison=sevens, claim=3),
    "backdoor": Attack(TRAINED, poison=backdoor),
    "backdoor, 3 times the claim": Attack(TRAINED, poison=backdoor, claim=3),
    "backdoor, hidden": Attack(SENT, hidden, backdoor),
    "backdoor, hidden in one stretch": Attack(LEAP, hidden, backdoor),
    "backdoor, hidden in some stretches": Attack(STRETCHES, hidden, backdoor),
    "the same in every 3rd round": Attack(STRETCHES, hidden, backdoor, every=3),
    "the same, and honest while suspected": Attack(STRETCHES, hidden, backdoor, every=3, waits=True),
    "wrong labels, hidden in some stretches": Attack(STRETCHES, hidden, wrong),
}


@dataclass
class Found:
    loss: float = 0.0
    accuracy: float = 0.0
    fooled: float = 0.0
    """Percent of marked images that are taken for 0."""
    credit: float = 0.0
    """Of attackers, to what they would have as honest ones."""
    banned: dict[int, int] = field(default_factory=dict)
    """Attackers -> the round in which they were banned."""
    left_out: int = 0
    """Honest contributions."""
    given: int = 0
    blamed: int = 0
    """Honest peers that were banned, or named as culprits."""


class Swarm:
    """The owner, volunteers, and attackers, who come last."""

    def __init__(self, peers: int, attackers: int, attack: Attack, seed: int) -> None:
        self.data, self.attack, self.peers = Data(seed), attack, peers
        self.bad = range(peers - attackers, peers)
        self.scouts = range(peers, peers + (SCOUTS if attackers else 0))
        self.names = [f"peer-{index:02}" for index in range(peers)]
        config, everybody = CONFIG.collaborative, range(peers + len(self.scouts))
        self.states = {
            one: OuterState(network(seed), lr=config.outer_lr, momentum=config.outer_momentum) for one in everybody
        }
        self.size = self.states[OWNER].num_parameters
        self.trainers = Trainers(len(everybody), self.size)
        honest = range(1, self.bad[0] if attackers else peers)
        self.updates = {one: SPEEDS[(one - 1) % len(SPEEDS)] if one in honest else UPDATES for one in everybody}
        self.generators = {one: torch.Generator().manual_seed(1000 * seed + one) for one in everybody}
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.out = set[int]()
        self.dropped, self.culprits, self.is_stray = Strikes(), Strikes(), False
        self.moves = Moves(self.size)
        self.uneven: dict[str, float] = {}
        self.owner = self._owner()
        self.auditor = Auditor(self.state, self.states[OWNER], hash, lambda index: (RATE, RATE), 1.0, 1.0)
        self.auditor._took = AUDIT

    @property
    def suspects(self) -> dict[str, int]:
        """Who was found false, and how many audits it has passed since."""
        return self.auditor._suspects

    def _owner(self) -> Averaging:
        common = self.states[OWNER]
        here = Distributed(RankEnv.single(), torch.device("cpu"))
        self.state = state = build(alone(CONFIG), here, self.data.splits, model=common.model)
        me = Member(self.names[OWNER], "owner", "owner", 0, "", b"")
        averager: Any = SimpleNamespace(
            client_mode=False, peer_id=self.names[OWNER], lock_averaged_tensors=threading.Lock(),
            note_used=self._note_used, taken_back=self._taken_back, alone=self._alone,
        )  # fmt: skip
        dht: Any = SimpleNamespace(member=lambda peer: me if peer == self.names[OWNER] else None)
        link: Any = SimpleNamespace(learn=lambda sent, outcome: "", upload=None)
        averaging = Averaging(averager, dht, common, CONFIG.collaborative, link)
        averaging.trial = AverageTrial(state, common, 1e9)
        return averaging

    def _note_used(self) -> None:
        self.moves.add(self.screen.moved())

    def _taken_back(self, peer: str) -> Tensor | None:
        return self.moves.take(peer)

    def _alone(self, peer: str) -> Tensor | None:
        parts = [values for _, values in self.screen.alone(peer)]
        return torch.cat([*parts, self.average[self.size :]]) if parts else None

    def _attacks(self, one: int) -> bool:
        return one in self.bad and self.active and not (self.attack.waits and self.names[one] in self.suspects)

    def _batch(self, one: int) -> Batch:
        which = torch.randint(len(self.data.images), (BATCH,), generator=self.generators[one])
        batch = self.data.images[which], self.data.labels[which]
        if self._attacks(one) and self.attack.poison:
            return self.attack.poison(self.data, *batch)
        return batch

    def run(self) -> Found:
        attack, found, credit = self.attack, Found(), dict.fromkeys(self.bad, 0.0)
        for turn in range(ROUNDS):
            self.active = turn >= FIRST and turn % attack.every == 0
            here = [one for one in range(self.peers) if one not in self.out]
            group = [self.names[one] for one in here]
            for one in (*self.scouts, *(here[1:] if self.is_stray else ())):
                self._adopt(one)
            updates = {one: self.updates[one] for one in (*here, *self.scouts)}
            self.trainers.train({one: self.states[one].model for one in updates}, updates, self._batch)
            given = {one: self.states[one].give(BATCH * updates[one]) for one in updates}
            vectors = {one: given[one].vector.clone() for one in here}
            claims = {one: float(given[one].weights[0]) for one in here}
            for one in set(self.bad).intersection(here):
                claims[one] *= attack.claim
                if self._attacks(one):
                    scouts = torch.stack([given[scout].vector[: self.size] for scout in self.scouts])
                    vectors[one][: self.size] = attack.change(Known(scouts, vectors[one][: self.size].clone()))
            self._average(here, vectors, claims)
            result = self._settle(group, given[OWNER], turn)
            everything = (True,) * num_parts(len(self.average))
            for one in here[1:]:
                self.states[one].step(Average(self.average, turn + 1, everything, everything), given[one])
            self.is_stray = result.refused
            verdicts, honest = self.screen.verdicts(), {self.names[one] for one in here[1:] if one not in self.bad}
            found.given += len(honest)
            found.left_out += sum(v.peer in honest and v.action != "clipped" for v in verdicts)
            found.blamed += sum(v.peer in honest for v in result.harmful or ())
            for one in credit:
                credit[one] += 0.0 if result.refused else self.screen.counted().get(self.names[one], 0.0)
            out = {*self.dropped.note(verdicts, group)}
            if result.harmful is not None:
                out |= {*self.culprits.note(result.harmful, group)}
            for one in {self.names.index(peer) for peer in out} | self._audited(here[1:]):
                self.owner.undo([self.names[one]])
                self.out.add(one)
                self.is_stray = True
                found.blamed += one not in self.bad
                if one in self.bad:
                    found.banned[one], credit[one] = turn + 1, 0.0
        found.credit = sum(credit.values()) / max(1, BATCH * UPDATES * ROUNDS * len(self.bad))
        return self._measured(found)

    def _adopt(self, one: int) -> None:
        owner = self.states[OWNER]
        self.states[one].load(owner.theta, owner.momentum, owner.round)

    def _average(self, here: Sequence[int], vectors: dict[int, Tensor], claims: dict[int, float]) -> None:
        owner = self.names[OWNER]
        # Who was found false does not count before it has passed some audits.
        limits = KnownSenders(frozenset({owner}), dict.fromkeys(self.auditor.unproven, 0.0), own=owner, keeps=True)
        self.screen, parts = Screen([self.names[one] for one in here], limits, self.size), list[Tensor]()
        for part in cuts(len(vectors[OWNER])):
            sent = {place: vectors[one][part] for place, one in enumerate(here)}
            weights = {place: claims[one] for place, one in enumerate(here)}
            parts.append(self.screen.average(part.start, sent, weights, vectors[OWNER][part]))
        self.average = torch.cat(parts)

    def _settle(self, group: Sequence[str], given: Any, turn: int) -> Any:
        self.owner.averager._averaged_tensors = [self.average.clone()]
        n = num_parts(len(self.average))
        outcome = ExchangeOutcome((len(group),) * n, (len(group),) * n, (True,) * n, (self.names[OWNER],) * n)
        averaged = Averaged(dict.fromkeys(group, 80.0), False, outcome)
        return settle(self.owner, given, averaged, next_round=turn + 1, leads=True)

    def _audited(self, volunteers: Sequence[int]) -> set[int]:
        """Who is found false a second time."""
        for one in volunteers:
            cheats = self._attacks(one) and self.attack.found in (LEAP, STRETCHES)
            before = LEFT * self.uneven.get(self.names[one], 0.0)
            self.uneven[self.names[one]] = max(before, UNEVEN if cheats else HONEST)
        heard, out = Heard((), 0, (), self.uneven), set[int]()
        self.auditor.owe(heard)
        drawn = self.auditor.draw([self.names[one] for one in volunteers], heard)
        for one in map(self.names.index, drawn):
            if not (self._attacks(one) and self.random.random() < self.attack.found):
                self.auditor.note_true(self.names[one])
                continue
            self.owner.undo([self.names[one]])
            self.is_stray = True
            if self.auditor.note_false(self.names[one], "").action == "dropped":
                out.add(one)
        return out

    @torch.no_grad()
    def _measured(self, found: Found) -> Found:
        common, data = self.states[OWNER], self.data
        model, labels = common.model.eval(), data.test_labels
        with common.in_model():
            out, fooled = model(data.test), model(marked(data.test)).argmax(1)
        found.loss = float(cross_entropy(out, labels))
        found.accuracy = 100 * float((out.argmax(1) == labels).float().mean())
        found.fooled = 100 * float((fooled[labels != 0] == 0).float().mean())
        return found


def main() -> None:
    """Print the table, or some of its rows, each beside the same swarm without the attackers."""
    parser = argparse.ArgumentParser("python -m tests.swarm.simulated", description=__doc__)
    parser.add_argument("attack", nargs="*", choices=[[], *ATTACKS], help="all without one")
    parser.add_argument("--sizes", nargs="*", default=SIZES, type=lambda text: tuple(map(int, text.split(","))))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for cells in (HEAD, ["---"] * len(HEAD)):
        print(f"| {' | '.join(cells)} |")
    for peers, attackers in args.sizes:
        without = [Swarm(peers - attackers, 0, ATTACKS["honest"], seed).run() for seed in range(SEEDS)]
        for name in args.attack or ATTACKS:
            for seed, calm in enumerate(without):
                found = Swarm(peers, attackers, ATTACKS[name], seed).run()
                cells = [
                    name, f"{attackers} of {peers}", f"{seed}", f"{100 * (found.loss / calm.loss - 1):+.1f} %",
                    f"{found.accuracy - calm.accuracy:+.2f}", f"{found.fooled:.1f} % ({calm.fooled:.1f} %)",
                    f"{100 * found.credit:.0f} %", ", ".join(map(str, found.banned.values())) or "-",
                    f"{found.left_out} of {found.given}, {found.blamed}",
                ]  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
