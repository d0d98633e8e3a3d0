"""What the peers of a run have in common; the averaging itself is done by hand here."""

import errno
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.config.loading import load
from trainkit.swarm.identity.admission import Member
from trainkit.swarm.peer.link import codec_back
from trainkit.swarm.protocol.codecs import PART, Codec, decode, encode, encoded_bytes
from trainkit.swarm.protocol.outer_step import Average, OuterState, OwnPart, put_away
from trainkit.swarm.trust.reducers import has_drifted


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def step(
    common: OuterState,
    vector: Tensor,
    given: OwnPart,
    *,
    arrived: Sequence[bool] = (),
    counted: Sequence[bool] = (),
    trained_on: bool = False,
) -> None:
    """Make the step of a round, by default with everything in it."""
    everything = [True] * len(given.weights)
    average = Average(vector, common.round + 1, arrived or everything, counted or everything)
    common.step(average, given, trained_on=trained_on)


class Vectors(TorchDispatchMode):
    """Number of new tensors with at least so many values."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = size
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.numel() >= self.size:
            self.count += made.untyped_storage().data_ptr() not in known
        return made


@pytest.mark.parametrize("trained_on", [False, True])
def test_a_step_makes_no_vector_of_the_models_length(trained_on: bool) -> None:
    """Six were 2 GB for 88 million weights, at the end of each round."""
    size = 3 * PART + 5
    common = OuterState(nn.Linear(size, 1, bias=False), lr=1.0, momentum=0.5)
    given = common.give(8)
    assert given.moved.data_ptr() == given.vector.data_ptr()
    average = torch.ones(size)
    with Vectors(size) as vectors:
        step(common, average, given, trained_on=trained_on)
    assert vectors.count == 0


def test_a_process_that_was_forked_gives_up_what_it_has_of_the_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    common = OuterState(model, lr=1.0, momentum=0.5)
    common.give_up()
    left = [common.theta, common.momentum, *model.parameters(), *model.buffers()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in left) == 0


@pytest.mark.parametrize("is_full", [False, True])
def test_what_is_put_away_is_the_same_and_on_the_disk_if_there_is_room(
    is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*of: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    if is_full:
        monkeypatch.setattr(os, "posix_fallocate", fails)
    tensors = {
        "one": torch.tensor(3),
        "none": torch.zeros(0),
        "half": torch.ones(3).half(),
        "large": torch.randn(1 << 22),
    }
    found = put_away(tensors)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert (" (deleted)" in mapping_of(found["large"])) != is_full


def mapping_of(tensor: Tensor) -> str:
    """Line of this process's map in which the tensor lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line
    raise AssertionError("nowhere")


# DiLoCo


def outer_state(*, lr: float = 1.0, momentum: float = 0.0) -> tuple[nn.Module, OuterState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, OuterState(model, lr=lr, momentum=momentum)


def weights(outer: OuterState) -> Tensor:
    """That the peers have in common, without running statistics."""
    return outer.theta[: outer.num_parameters].clone()


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)], ids=["keeps what it has learned", "nesterov"])
def test_the_outer_step_is_sgd_with_nesterov_momentum(lr: float, momentum: float) -> None:
    model, outer = outer_state(lr=lr, momentum=momentum)
    reference = weights(outer).requires_grad_()
    sgd = torch.optim.SGD([reference], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for number in range(3):
        move(model, 0.1 * (number + 1))
        learned, given = flat(model), outer.give(8)
        reference.grad = given.vector[: outer.num_parameters].clone()
        # It points back to where the round began.
        assert torch.allclose(weights(outer) - reference.grad, learned)
        sgd.step()
        step(outer, given.vector, given)
        assert torch.allclose(weights(outer), reference.detach(), atol=1e-6)
        assert momentum or torch.allclose(flat(model), learned)


def test_what_is_not_finite_has_no_say_and_the_model_starts_anew() -> None:
    model, outer = outer_state()
    before = outer.theta.clone()
    move(model, math.nan)
    given = outer.give(8)
    assert (given.usable, set(given.weights), float(given.vector[: outer.num_parameters].norm())) == (False, {0.0}, 0.0)
    step(outer, given.vector, given)
    assert torch.equal(outer.theta, before)
    assert torch.equal(flat(model), weights(outer))


def test_a_late_average_keeps_what_was_learned_since() -> None:
    (model, outer), (in_time, same) = (outer_state(lr=0.7, momentum=0.9) for _ in range(2))
    for one in (model, in_time):
        move(one, 0.5)
    given, average = outer.give(8), torch.full_like(outer.theta, -0.3)
    step(same, average, same.give(8))
    move(model, 0.01)  # it trains on
    step(outer, average, given, trained_on=True)
    assert torch.equal(outer.theta, same.theta)
    assert torch.equal(outer.momentum, same.momentum)
    assert torch.allclose(flat(model), flat(in_time) + 0.01, atol=1e-6)
    # Only that is the next round's.
    assert torch.allclose(outer.give(8).vector[: outer.num_parameters], torch.tensor(-0.01), atol=1e-6)


@pytest.mark.parametrize("trained_on", [False, True])
def test_what_was_not_counted_is_in_the_mean_of_a_later_contribution(trained_on: bool) -> None:
    """With the samples of both rounds."""
    model, outer = outer_state()
    move(model, 0.5)
    others = torch.full_like(outer.theta, 0.2)
    step(outer, others, outer.give(8), counted=[False], trained_on=trained_on)
    assert torch.allclose(flat(model), weights(outer) + 0.5, atol=1e-6)  # it has followed the others, and keeps its own
    move(model, 0.3)
    given = outer.give(4)
    assert given.weights == (12.0,)
    assert torch.allclose(given.vector[: outer.num_parameters], torch.tensor(-0.4), atol=1e-6)
    step(outer, others, given, trained_on=trained_on)
    assert torch.allclose(flat(model), weights(outer), atol=1e-6)
    move(model, 0.1)
    assert outer.give(4).weights == (4.0,)


@pytest.mark.parametrize("rounds_since", [0, 3])
def test_what_a_peer_has_moved_is_taken_back_with_what_momentum_makes_of_it(rounds_since: int) -> None:
    made = [outer_state(lr=0.7, momentum=0.5) for _ in range(2)]
    harm = torch.linspace(-1, 1, made[0][1].num_parameters)
    for (_, outer), is_harmed in zip(made, (True, False), strict=True):
        nothing = replace(outer.nothing(), sound=True)
        step(outer, torch.cat([0.1 + harm * is_harmed, outer.theta[outer.num_parameters :]]), nothing)
        for number in range(40):
            if is_harmed and number == rounds_since:
                outer.undo(harm)
            step(outer, nothing.vector, nothing)
    (harmed, first), (spared, second) = made
    torch.testing.assert_close(weights(first), weights(second))
    torch.testing.assert_close(flat(harmed), flat(spared))


@pytest.mark.parametrize("trained_on", [False, True])
def test_what_4_bit_round_off_stays_in_the_model_and_is_given_later(trained_on: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(PART // 64, 128, bias=False)  # of two parts
    outer = OuterState(model, lr=1.0, momentum=0.0)
    began, learned = flat(model), 1e-3 * torch.randn(2 * PART)
    with torch.no_grad():
        model.weight.add_(learned.view_as(model.weight))
    far = []
    for _ in range(4):
        given = outer.give(8, "4bit")
        assert torch.equal(torch.cat([decode(encode(part, "4bit"), "4bit", PART) for part in given.vector.split(PART)]),
                           given.vector)  # fmt: skip
        step(outer, given.vector, given, trained_on=trained_on)
        assert torch.allclose(flat(model), began + learned, atol=1e-7)
        far.append(float((outer.theta - began - learned).norm() / learned.norm()))
    assert 0.1 < far[0] < 0.15
    assert far[3] < 0.001


def test_what_is_small_beside_large_values_arrives_in_4_bit_all_the_same() -> None:
    """Of four peers that learn the same in each of 40 rounds; half a step of 4 bit is 0.07."""
    model = nn.Linear(8, 64, bias=False)
    outer = OuterState(model, lr=1.0, momentum=0.0)
    began, learned = outer.theta.clone(), torch.full((512,), 0.03)
    learned[0], back = 1.0, codec_back(load("hivemind", ["collaborative.compression=4bit"]).config.collaborative)
    for _ in range(40):
        with torch.no_grad():
            model.weight.add_(learned.view_as(model.weight))
        given = outer.give(8, "4bit")
        averaged = 0.25 * given.vector - 0.75 * learned
        step(outer, decode(encode(averaged, back), back, 512), given)
    assert torch.allclose(outer.theta - began, 40 * learned, rtol=0.1)


def test_what_4_bit_round_off_is_part_of_a_contribution_of_two_rounds() -> None:
    model = nn.Linear(PART // 64, 64, bias=False)
    outer = OuterState(model, lr=1.0, momentum=0.0)
    torch.manual_seed(0)
    for counted in (False, True):
        with torch.no_grad():
            model.weight.add_(1e-3 * torch.randn(model.weight.shape))
        learned, given = flat(model), outer.give(8, "4bit")
        step(outer, torch.zeros(PART), given, counted=[counted])
        taken = 2 * given.vector if counted else torch.zeros(PART)
        assert torch.allclose(flat(model), learned + taken, atol=1e-7)


def test_a_part_with_running_statistics_is_not_rounded() -> None:
    model, outer = outer_state()
    move(model, 0.1234)
    assert torch.equal(outer.give(8, "4bit").vector, outer.give(0).vector)


def test_where_nothing_has_arrived_common_weights_and_momentum_stay() -> None:
    outer = OuterState(nn.Linear(PART // 64, 128, bias=False), lr=1.0, momentum=0.9)  # of two parts
    before = outer.theta.clone()
    step(outer, torch.ones_like(outer.theta), outer.give(8), arrived=[False, True])
    assert torch.equal(outer.theta[:PART], before[:PART])
    assert float(outer.momentum[:PART].norm()) == 0.0
    assert not torch.equal(outer.theta[PART:], before[PART:])


def test_the_model_as_the_peers_have_it_in_common_is_lent_and_given_back() -> None:
    model, outer = outer_state()
    move(model, 0.5)
    own = flat(model)
    with outer.in_model():
        assert torch.equal(flat(model), weights(outer))
    assert torch.equal(flat(model), own)


@pytest.mark.parametrize("trained_on", [False, True])
def test_running_statistics_are_averaged_but_for_a_model_that_trains_on(trained_on: bool) -> None:
    model, outer = outer_state()
    mean, size = model.get_buffer("1.running_mean"), outer.num_parameters
    model(torch.randn(64, 4))
    given = outer.give(8)
    assert torch.allclose(given.vector[size : size + 3], mean)
    given.vector[size:] = 2.0
    model(torch.randn(64, 4))
    own = mean.clone()
    step(outer, given.vector, given, trained_on=trained_on)
    assert torch.equal(outer.theta[size : size + 3], torch.full((3,), 2.0))
    assert torch.equal(mean, own if trained_on else torch.full((3,), 2.0))


@pytest.mark.parametrize("broken", ["weights instead of", "momentum: weights instead of", "not finite"])
def test_a_state_that_does_not_fit_or_is_not_finite_changes_nothing(broken: str) -> None:
    """One of another model, of another optimizer, of a model that has diverged."""
    _, outer = outer_state()
    before = outer.theta.clone()
    theta = {"weights instead of": before[:-1], "not finite": before * math.nan}.get(broken, before)
    momentum = outer.momentum[:-1] if "momentum" in broken else outer.momentum
    with pytest.raises(ValueError, match=broken.removeprefix("momentum: ")):
        outer.load(theta, momentum, 1)
    assert torch.equal(outer.theta, before)


def test_peers_with_the_same_weights_have_the_same_probe_and_no_others() -> None:
    """Weights that differ anywhere have another one in every round."""
    owner = Member("owner", "owner", "owner", 0, "", b"")
    (_, ours), (_, theirs) = outer_state(), outer_state()
    assert torch.equal(ours.probe(), theirs.probe())
    by = 0.1 * float(ours.theta.norm())
    for place in range(ours.theta.numel()):
        theirs.theta[place] += by
        for ours.round in (0, 5):
            theirs.round = ours.round
            own, given = (one.probe().numpy().tobytes() for one in (ours, theirs))
            assert has_drifted(own, {"owner": given}, lambda peer: owner, role="volunteer", own_id="me")
        theirs.theta[place] -= by
    nobody = Member("vera", "vera", "volunteer", 0, "", b"")
    near, far = ((ours.probe() * factor).numpy().tobytes() for factor in (1.0 + 1e-6, 1.01))
    for said, member, role, drifted in (
        (far, owner, "volunteer", True),
        (near, owner, "volunteer", False),
        (far, nobody, "volunteer", False),  # what volunteers say of their weights makes nobody a stray
        (far, owner, "owner", False),  # by whose weights all others are measured
    ):
        own, known = ours.probe().numpy().tobytes(), {member.peer_id: member}
        assert has_drifted(own, {member.peer_id: said}, known.get, role=role, own_id="me") is drifted  # type: ignore[arg-type]


def layers() -> Tensor:
    """Two layers, one a thousand times smaller, a block of zeros, and a rest that fills no block."""
    torch.manual_seed(0)
    return torch.cat([torch.randn(4096), torch.randn(4096) / 1000, torch.zeros(512), torch.randn(7)])


@pytest.mark.parametrize(("codec", "error"), [("none", 0.0), ("fp16", 3e-4), ("8bit", 0.01), ("4bit", 0.15)])
def test_a_codec_keeps_every_layer_in_the_bytes_it_promises(codec: Codec, error: float) -> None:
    data = encode(layers(), codec)
    assert len(data) == encoded_bytes(8711, codec)
    read = decode(data, codec, 8711)
    for part in (slice(0, 4096), slice(4096, 8192), slice(8192, 8704), slice(8704, None)):
        assert float((read[part] - layers()[part]).norm()) <= error * float(layers()[part].norm())
    with pytest.raises(ValueError, match="bytes instead of"):
        decode(data, codec, 8710)
    with pytest.raises(ValueError, match="unknown codec"):
        decode(data, "pickle", 8711)
