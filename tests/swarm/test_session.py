"""What peers must have alike to train together, and the ranks of one peer: what rank 0 says, the others do."""

import hashlib
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.rank_functions import QUICK, run_ranks
from trainkit.cluster.ranks import RankEnv
from trainkit.common import fileio
from trainkit.common.errors import RefusedError, UserError
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.data.registry import build_data
from trainkit.data.tensors import TensorSamples
from trainkit.distributed.process_group import distributed
from trainkit.models.library import build_model
from trainkit.run.folder import RunDir
from trainkit.swarm.peer import peer_ranks, same_run, session
from trainkit.swarm.peer.place import Hooks, PeerSpec, saved_peer
from trainkit.swarm.peer.same_run import code_facts, facts_of, meeting_place, parameters_in, require_same
from trainkit.swarm.protocol import addresses
from trainkit.swarm.protocol.messages import Manifest
from trainkit.swarm.protocol.outer_step import Average, OuterState
from trainkit.training.update import Updater

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CONFIG = load("hivemind").config

ROUNDS = [name.removesuffix(".py") for name in (*same_run.ROUNDS, "swarm/peer/link.py", "swarm/peer/doctor.py")]


@pytest.mark.parametrize(
    ("file", "differs"),
    [
        *((file, ["code of trainkit"]) for file in ("data/order", "training/new", "swarm/protocol/outer_step")),
        *((file, []) for file in ("swarm/peer/doctor", "report/page")),
        ("mine_of_facts", ["code of mine_of_facts"]),
    ],
)
def test_code_that_decides_what_is_computed_counts_also_a_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, differs: list[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("data/order", "models/net", "training/deep/er", "report/page", "mine_of_facts", *ROUNDS):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""{name}"""\nx = 1\n')

    before = code_facts(tmp_path, ["mine_of_facts:build", "digits"])
    (tmp_path / f"{file}.py").write_text("x = 2\n")
    after = code_facts(tmp_path, ["mine_of_facts:build", "digits"])
    assert [key for key in after if after[key] != before[key]] == differs


def test_the_files_that_are_looked_at_exist() -> None:
    package = Path(session.__file__).parents[2]
    assert list(code_facts(package, ())) == ["code of trainkit"]
    assert all(any((package / room).rglob("*.py")) for room in same_run.ROOMS)


def test_each_difference_is_told_with_both_values() -> None:
    theirs = {"torch": "2.6", "seed": "0", "data": "digits", "code of training": "ab12", "timm": "1.0.9"}
    ours = {"torch": "2.7", "seed": "0", "data": "digits, 9 classes", "code of training": "cd34"}
    require_same(theirs, theirs)
    with pytest.raises(RefusedError) as refused:
        require_same(theirs, ours)
    error = refused.value
    assert error.what == "This peer differs from the run in: code of training, data, timm, torch."
    assert "timm: none here, 1.0.9 in the run; torch: 2.7 here, 2.6 in the run." in error.why


def test_other_libraries_are_let_in_where_an_audit_can_look_at_them() -> None:
    theirs = {"torch": "2.15", "hivemind": "1.1", "torchvision": "0.30.0", "code of trainkit": "ab12"}
    ours = {**theirs, "torch": "2.14", "torchvision": "0.29.1"}
    words = "torch: 2.14 here, 2.15 in the run; torchvision: 0.29.1 here, 0.30.0 in the run"
    assert require_same(theirs, ours, None, "") == words
    assert require_same(theirs, theirs, None, "") == require_same(theirs, theirs, None, "too large") == ""
    for strict in ({"hivemind": "1.2"}, {"code of trainkit": "cd34"}):
        with pytest.raises(RefusedError, match=f"differs from the run in: {next(iter(strict))}, torch, torchvision."):
            require_same(theirs, {**ours, **strict}, None, "")
        with pytest.raises(RefusedError) as refused:
            require_same(theirs, {**theirs, **strict}, None, "too large")
        assert "too large" not in refused.value.why
    with pytest.raises(RefusedError) as refused:
        require_same(theirs, ours, None, "too large")
    assert refused.value.why == f"{words}. Whether other libraries train alike cannot be checked here: too large."


@pytest.mark.parametrize(
    ("trains", "is_volunteer", "why"),
    [
        (True, True, ""),
        (False, True, "the run's creator does not train"),
        (True, False, "only the work of volunteers is audited"),
    ],
)
def test_no_audit_is_possible_of(trains: bool, is_volunteer: bool, why: str) -> None:
    manifest = Manifest("run-1", "run", "seed: 0", 1, "ab" * 32, 10, 1, 8, trains=trains)
    assert same_run.untried(manifest, is_volunteer=is_volunteer) == why


def test_who_is_alike_meets_the_others_and_who_differs_looks_elsewhere() -> None:
    place = meeting_place("run-1", {"a": "1", "b": "2"})
    assert meeting_place("run-1", {"b": "2", "a": "1"}) == place
    for facts in ({"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": ""}):
        assert meeting_place("run-1", facts) != place


def test_a_third_digit_or_a_build_for_another_device_is_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for version in ("2.6.0", "2.6.1", "2.6.0+cu124", "2.7.0", "3.6.0"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        found[version] = same_run.installed()["torch"]
    assert list(found.values()) == ["2.6", "2.6", "2.6", "2.7", "3.6"]


def net(width: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))


@pytest.fixture(scope="module")
def splits() -> Splits:
    return build_data(CONFIG.data)


def test_seed_shapes_and_samples_must_be_alike_and_weights_need_not(
    splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_run, "code_facts", lambda package, names: {})  # alike here
    assert isinstance(splits.train, TensorSamples)
    images, labels = splits.train.images, splits.train.labels
    ours = facts_of(CONFIG, splits, net())
    assert parameters_in(ours) == sum(parameter.numel() for parameter in net().parameters())
    assert [parameters_in({"model": text}) for text in ("", "many parameters", "-5 parameters")] == [0, 0, 0]

    def differ(config: Config = CONFIG, data: Splits = splits, model: nn.Module | None = None) -> list[str]:
        theirs = facts_of(config, data, model or net())
        return [key for key in ours if ours[key] != theirs[key]]

    assert differ() == differ(model=net(seed=1)) == []  # the swarm gives its own weights
    assert differ(model=net(width=5)) == differ(model=net().double()) == ["model"]
    assert differ(CONFIG.model_copy(update={"seed": 1})) == ["seed"]
    for samples in ((images.flip(0), labels), (images, (labels + 1) % 10), (images[:-1], labels[:-1])):
        assert differ(data=replace(splits, train=TensorSamples(*samples))) == ["data"]
    renamed = replace(splits.info, class_names=tuple(reversed(splits.info.class_names)))
    assert differ(data=replace(splits, info=renamed)) == ["data"]


# The ranks of one peer, without a swarm around it.


def settings(*overrides: str) -> Config:
    return load("hivemind", [*QUICK, "train.global_batch_size=32", "data.workers=0", *overrides]).config


def digest(model: nn.Module) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def rank(env: RankEnv, die: int = -1) -> dict[str, Any]:
    """Two rounds of a peer; what each rank has at their end. ``die``: the rank that is killed in the second."""
    with distributed(env, use_gpu=False, collective_timeout=session.PATIENCE) as dist:
        if not env.is_main:
            beats = [0]

            def beat() -> None:
                beats[0] += 1
                if die == env.rank and beats[0] > 12:
                    os.kill(os.getpid(), signal.SIGKILL)

            return {"weights": digest(peer_ranks.follow(dist, beat=beat))}
        config = settings("optim.weight_decay=0")
        splits = build_data(config.data)
        model = build_model(config.model, splits.info, config.seed + 1)  # which must come over the others' own
        common = OuterState(model, lr=0.7, momentum=0.9)
        found: dict[str, Any] = {}
        with (
            peer_ranks.spread(config, dist, splits, common, "QmPeer") as peer,
            peer.batches(peer_ranks.data_seed(config, "QmPeer"), 0) as batches,
        ):
            update = Updater(peer.state)
            for number in range(2):
                for step in range(3):
                    peer.before_update(1e-3, 10 * number + step)
                    with peer_ranks.together(peer.state.dist.world_size):
                        update(batches, lr=1e-3, seed=10 * number + step)
                found["samples"] = peer.read(update.meter)["samples"]
                given = common.give(8)
                found[f"moved {number}"] = float(given.moved.norm())
                everything = [True] * len(given.weights)
                common.step(Average(given.vector, number + 1, everything, everything), given)
            peer.before_update(0.0, 99)  # after which all have the weights of the round's end
            update(batches, lr=0.0, seed=99)
        return {**found, "weights": digest(model), "theta": common.theta.tolist()}


@pytest.mark.nightly
def test_all_ranks_agree_bit_for_bit_and_all_their_samples_count() -> None:
    first, second = run_ranks(2, rank)
    assert first["weights"] == second["weights"]
    (alone,) = run_ranks(1, rank)
    assert first["samples"] == alone["samples"] == 3 * 32
    assert first["moved 1"] == pytest.approx(alone["moved 1"], rel=1e-3)
    torch.testing.assert_close(torch.tensor(first["theta"]), torch.tensor(alone["theta"]), rtol=1e-3, atol=1e-4)


def test_an_update_that_cannot_be_divided_is_refused(splits: Splits) -> None:
    two: Any = SimpleNamespace(world_size=2)
    nothing: Any = None
    with (
        pytest.raises(UserError, match=r"train\.global_batch_size=33 cannot be split evenly over 2 ranks"),
        peer_ranks.spread(settings("train.global_batch_size=33"), two, splits, nothing, "QmPeer"),
    ):
        pass


@pytest.mark.nightly
def test_a_rank_that_dies_ends_the_peer_at_once_and_in_words() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="A rank of this peer has died"):
        run_ranks(2, rank, 1)
    assert time.monotonic() - began < 60


def test_others_are_remembered_on_the_disk_and_not_without_end(tmp_path: Path) -> None:
    run, peer = RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n"), addresses.peer_of(addresses.EXAMPLE)
    one: Any = session.Session(ExitStack(), PeerSpec("anna", host="0.0.0.0"), Hooks(lambda: False, print))
    one.writer, one.dht, one.clock = SimpleNamespace(run=run), SimpleNamespace(port=4711), SimpleNamespace(first=7)
    one.identity = SimpleNamespace(content=b"key")

    def at(port: int) -> str:
        return f"/ip4/192.168.1.7/tcp/{port}/p2p/{peer}"

    one.remember([at(1)])
    one.keep_place("hivemind-0001-0123abcd", [at(4711)])
    assert saved_peer(run) == one.place
    one.remember([at(2)])
    one.remember([at(port) for port in range(10, 10 + addresses.MOST_OTHERS - 2)])
    others = fileio.read_object(run.path / "swarm.json")["others"]
    assert (len(others), others[0], others[-2:]) == (addresses.MOST_OTHERS, at(10), [at(2), at(1)])
    one.remember([at(99)])
    assert one.others == (at(99), *others[:-1])
    (run.path / "swarm.json").unlink()
    one.remember([at(10)])  # which is known
    assert saved_peer(run) is None
