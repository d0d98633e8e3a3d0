"""What attackers come to in swarms of real peers, for docs/security.md: ``python -m tests.swarm.table FILE``.

    python -m tests.swarm.table FILE --only labels --seed 1     # one swarm, some two minutes

Each line of FILE is a swarm; what is in there already is not run again. All of them learn digits of which a third have
wrong labels, for 24 rounds of 4 s after all have met; rounds until somebody is named or banned count from then, too.
Loss is that of the validation samples, with wrong labels as well; accuracy that of all images that nobody trains on, by
their true labels; the backdoor's success, the share of these (but for zeros) that are zeros with its trigger on them.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from torch.nn.functional import cross_entropy

from tests.swarm import noisy
from tests.swarm.attacked import HARDER, Swarm, swarm
from tests.swarm.attackers import marked
from tests.swarm.conftest import started_in
from trainkit.checkpoint import format as checkpoints
from trainkit.common import jsonl
from trainkit.data.datasets import digits
from trainkit.models.fashion_cnn import build
from trainkit.run.contributions import Contributions
from trainkit.run.folder import RunDir

HONEST = "none"
ATTACKS: dict[str, tuple[str, ...]] = {
    name: (name,)
    for name in (
        *("labels", "trigger", "little", "hidden-trigger", "hidden-wrong", "lazy", "labels-claim", "trigger-claim"),
        *("half", "zeros", "last", "inner", "turned", "times-50", "weight", "reduces", "reduces-within", "hidden-slow"),
        *("name", "gathered", "ahead", "stall", "impostor"),
    )
} | {HONEST: (), "turned, 4 peers": ("turned",) * 4}
"""Each against the creator and two honest volunteers."""
SEEDS, ROUNDS = (1, 2), 24
UNSEEN = ("reduces", "reduces-within", "ahead", "gathered")
"""Who may be in no group, or be out of it before all have met."""
HEAD = ("attack", "loss", "accuracy", "backdoor", "named, banned in round", "credit", "honest left out, banned", "load")


def row(attack: str, seed: int) -> dict[str, Any]:
    """What a swarm has come to in which somebody attacks."""
    until = "mallory" if attack in UNSEEN else ""
    with TemporaryDirectory() as folder, started_in(Path(folder)) as commands:
        settings = (*HARDER, f"collaborative.rounds={3 * ROUNDS}", f"seed={seed}")
        found = swarm(commands, *ATTACKS[attack], honest=2, settings=settings, until=until, rounds=ROUNDS)
        return {"attack": attack, "seed": seed, **of_model(found.run), **of_events(found), "load": os.getloadavg()[1]}


@torch.no_grad()
def of_model(run: Path) -> dict[str, float]:
    """Of the last weights."""
    folder = run / "checkpoints"
    last = checkpoints.path_of(folder, checkpoints.steps(folder)[-1])
    seen, honest = noisy.data(run), digits.build(run)
    samples: Any = seen.val, honest.val, honest.test
    model = build(seen.info)
    model.load_state_dict(safetensors.torch.load_file(last / "model.safetensors"))
    images, labels = (torch.cat([getattr(part, name) for part in samples[1:]]) for name in ("images", "labels"))

    def out(pixels: torch.Tensor) -> Any:
        (mean,), (std,) = seen.info.mean, seen.info.std
        return model.eval()((pixels.float() / 255 - mean) / std)

    fooled = out(marked(images[labels > 0])).argmax(1) == 0
    return {
        "loss": float(cross_entropy(out(samples[0].images), samples[0].labels)),
        "accuracy": 100 * float((out(images).argmax(1) == labels).float().mean()),
        "backdoor": 100 * float(fooled.float().mean()),
    }


def of_events(found: Swarm) -> dict[str, Any]:
    """Who was named, left out and banned, and what was credited."""
    out = found.events("peer_dropped", "peer_left_out")
    rounds = [event["round"] for event in out if event["name"] == "mallory"]
    banned = found.events("peer_banned")
    credits = {one.name: one.samples for one in Contributions.of(RunDir(found.run)).best_first()}
    print(credits, *found.events("peer_audited"), *out, *banned, sep="\n")
    hers = credits.pop("mallory", 0.0)
    # Of whoever has the first invitation: two of them. The creator is a peer as well.
    fair = (sum(credits.values()) - credits.get("creator", 0.0)) / 2
    return {
        "met": found.met,
        "named": min(rounds, default=None),
        "banned": min((event["round"] for event in banned if event["name"] == "mallory"), default=None),
        "credit": hers / max(1, len(found.attackers)) / fair,
        "left_out": sum(event["name"] != "mallory" for event in out),
        "honest_banned": sum(event["name"] != "mallory" for event in banned),
        "refused": len(found.events("average_refused")),
    }


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table, as Markdown."""
    table = [HEAD, ["---"] * len(HEAD)]
    for attack in dict.fromkeys(one["attack"] for one in rows):
        own = [one for one in rows if one["attack"] == attack]
        table.append([
            attack,
            ", ".join(f"{one['loss']:.3f}" for one in own),
            ", ".join(f"{one['accuracy']:.1f} %" for one in own),
            ", ".join(f"{one['backdoor']:.1f} %" for one in own),
            "; ".join(", ".join(_after(one, what) for what in ("named", "banned")) for one in own),
            ", ".join(f"{100 * one['credit']:.0f} %" for one in own),
            "; ".join(f"{one['left_out']}, {one['honest_banned']}" for one in own),
            ", ".join(f"{one['load']:.1f}" for one in own),
        ])  # fmt: skip
    return [f"| {' | '.join(cells)} |" for cells in table]


def _after(one: Mapping[str, Any], what: str) -> str:
    """How many rounds after all had met."""
    return "-" if one[what] is None else str(one[what] - one["met"])


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser("python -m tests.swarm.table", description=__doc__)
    parser.add_argument("file", type=Path, help="of rows")
    parser.add_argument("--only", action="append", choices=ATTACKS, help="an attack; repeatable")
    parser.add_argument("--seed", action="append", type=int, help="repeatable")
    args = parser.parse_args()
    for seed in args.seed or SEEDS:
        for attack in args.only or ATTACKS:
            if not any((one["attack"], one["seed"]) == (attack, seed) for one in jsonl.read_jsonl(args.file)):
                found = row(attack, seed)
                with args.file.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    print(*lines(list(jsonl.read_jsonl(args.file))), sep="\n")


if __name__ == "__main__":
    main()
