"""Audits by replay: what honest volunteers show is true, on whatever machine; and what is found of those that cheat."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.swarm.audited import (
    NOT_TRAINED,
    OTHERWISE,
    TRUE,
    Swarm,
    crept,
    forgetful,
    half_turned,
    leapt,
    other_labels,
    other_rates,
    poisoned,
    turned,
    with_sums,
)  # fmt: skip
from trainkit.swarm.protocol.codecs import (
    BLOCK,
    PART,
    Codec,
    coarse,
    coarse_squares,
    cuts,
    exact,
    exact_squares,
    rounded,
)
from trainkit.swarm.trust import replay
from trainkit.swarm.trust.accounts import digests_of, parameters_of
from trainkit.swarm.trust.replay import misgiven, misled
from trainkit.swarm.trust.screening import Verdict


@pytest.fixture(autouse=True)
def clock_by_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots take no time, also where the machine has much to do."""
    monkeypatch.setattr("trainkit.swarm.trust.accounts._SHARE_FOR_SNAPSHOTS", math.inf)


@pytest.mark.parametrize(
    ("codec", "how"),
    [
        *(("8bit", {}), ("4bit", {"settles_after": 5}), ("8bit", {"counts": False})),
        *(("4bit", {"counts": False}), ("8bit", {"settles_after": 5, "counts": False})),
    ],
)
def test_what_an_honest_volunteer_shows_is_true(how: dict[str, Any], codec: Codec) -> None:
    swarm = Swarm(codec=codec)
    for number in range(8):
        action, why = swarm.audited(**how)
        assert (action, why[: len(TRUE)]) == ("audited", TRUE)
        assert swarm.auditor.verified == ({"ben": 24 * 32} if number else {})
        assert swarm.accounts.stated == swarm.auditor.verified or not number


@pytest.mark.parametrize("settles_after", [0, 5])
@pytest.mark.parametrize("rounds", [1, 2])
def test_who_has_missed_an_average_and_takes_over_the_weights_is_not_blamed(rounds: int, settles_after: int) -> None:
    swarm = Swarm()
    swarm.audited()
    swarm.audited(arrives=False)
    found = [swarm.audited(adopts=number == rounds - 1, settles_after=settles_after) for number in range(rounds)]
    found += [swarm.audited() for _ in range(4)]
    assert {action for action, _ in found} == {"audited"}, found
    assert found[-1][1].startswith(TRUE)


@pytest.mark.parametrize("other", [{"precision": "bf16"}, {"micro_batch_size": 8}])
def test_volunteers_with_other_hardware_are_believed(other: dict[str, Any]) -> None:
    swarm = Swarm(**other)
    assert {swarm.audited()[1][: len(TRUE)] for _ in range(6)} == {TRUE}


def test_two_ranks_that_are_one_peer_keep_a_journal() -> None:
    swarm = Swarm()
    swarm.journal._state = replace(swarm.state, model=nn.DataParallel(swarm.state.model))
    vars(swarm.journal._state)["optimizer"] = swarm.state.optimizer
    assert {swarm.audited()[1][: len(TRUE)] for _ in range(6)} == {TRUE}


@pytest.mark.parametrize(("trains", "codec"), [(True, "8bit"), (False, "8bit"), (True, "4bit")])
@pytest.mark.parametrize("sent", [half_turned, torch.zeros_like, lambda vector: 3 * vector])
def test_who_gives_something_else_than_it_has_trained_is_caught_at_once(
    sent: Callable[[Tensor], Tensor], trains: bool, codec: Codec
) -> None:
    swarm = Swarm(codec=codec)
    assert swarm.audited(trains=trains)[0] == ("audited" if trains else "")
    for action in ("left out", "dropped"):
        found, why = swarm.audited(trains=trains, sent=sent)
        assert (found, why[: len(NOT_TRAINED)]) == (action, NOT_TRAINED)
        assert why.endswith("; the next time it is banned") == (action == "left out")
        assert swarm.audited()[0] == "audited" or action == "dropped"  # and one that passes clears nobody


@pytest.mark.parametrize("codec", ["8bit", "4bit"])
def test_who_has_a_slow_link_shows_two_parts_of_what_it_has_given(codec: Codec) -> None:
    swarm = Swarm(codec=codec, is_slow=True)
    for settles_after in range(4):
        shown = swarm.shown(settles_after=settles_after, trains=False)
        assert len(set(shown.parts)) == 2
        assert 2 * 4 * PART // 2 < len(shown.data) < 2 * 4 * PART + 2000
        assert swarm.auditor.audit(shown) is None
    action, why = swarm.audited(sent=half_turned, trains=False)
    assert action == "left out"
    assert why.startswith(NOT_TRAINED)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("precision", "counts", "is_slow"),
    [
        *(("fp32", True, False), ("bf16", (True, False, True, True), False)),
        *(("bf16", True, True), ("fp32", False, True), ("fp32", (True, False, True, True), True)),
    ],
)
def test_an_audit_looks_at_one_snapshot_or_at_a_move(precision: str, counts: Any, is_slow: bool) -> None:
    swarm = Swarm(is_slow=is_slow, precision=precision, wide=True)
    kinds = set[bool]()
    for settles_after in 15 * (0, 5, 7, 3):  # which of them is drawn
        if swarm.round > 4 and kinds == {False, True}:
            break
        shown = swarm.shown(settles_after=settles_after, counts=counts)
        assert len(shown.data) < (15 if is_slow else 18) * swarm.common.theta.numel()
        kinds.add(shown.has_moved)
        verdict = swarm.verdict(shown)
        assert verdict.why.startswith(TRUE), verdict
    assert kinds == {False, True}
    assert swarm.auditor.verified


@pytest.mark.parametrize(
    "what", ["nothing", "another part", "a column", "other digests", "weights of a strange kind", "few weights"]
)
def test_parts_are_those_that_a_peer_has_committed_itself_to(what: str) -> None:
    swarm = Swarm(is_slow=True)
    shown = swarm.shown(trains=False)
    tensors = safetensors.torch.load(shown.data)
    name = f"part.{shown.parts[0]}"
    if what == "nothing":
        del tensors[name]
    elif what == "a column":  # of the same bytes: its difference from a row would have four billion values
        tensors[name] = tensors[name].view(-1, 1)
    elif what == "other digests":
        tensors["digests"] = tensors["digests"] + 1
    else:
        changed = {"another part": -tensors[name], "few weights": tensors[name][1:]}
        tensors[name] = changed.get(what, tensors[name].view(torch.int32))
    verdict = swarm.verdict(shown._replace(data=safetensors.torch.save(tensors)))
    reason = {"nothing": f"'{name}'", "other digests": "other digests"}.get(what, "other weights")
    assert verdict.why.startswith(f"{OTHERWISE}: {reason}; ")


def test_rounding_is_allowed_for_by_what_comes_of_it_in_those_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_ALIKE", 0.0)
    honest = Swarm(precision="bf16")
    for _ in range(4):
        # Of a number format that this machine has not: what was trained in bf16 is trained again in fp32.
        assert honest.audited(precision="fp16")[1].startswith(TRUE)
    cheat = Swarm(precision="bf16")
    other_labels(cheat)
    said = (cheat.audited(precision="fp16")[1] for _ in range(20))
    assert any(why.startswith("has trained differently") for why in said)


def test_smaller_than_any_number_that_is_sent_is_nothing() -> None:
    learned = torch.full((100,), 1e-9)
    assert misgiven({0: torch.zeros(100).numpy()}, learned) == ""
    assert misgiven({0: torch.zeros(100).numpy()}, 1e4 * learned).startswith("has sent something else")


@pytest.mark.parametrize("weights", ["alike", "with outliers", "nearly all small"])
@pytest.mark.parametrize(("values", "rounds"), [(7, 1), (1000, 3), (70_000, 1), (70_000, 3)])
@pytest.mark.parametrize("off", [0.0, 1e-6, 0.01])
def test_what_4_bit_make_of_honest_work_is_never_held_against_it(
    weights: str, values: int, rounds: int, off: float
) -> None:
    """Also where the owner's weights are off by as much as an audit puts up with, of what was learned."""
    torch.manual_seed(values)
    learned = {
        "alike": torch.randn(values),
        "with outliers": torch.randn(values) / torch.rand(values),
        "nearly all small": torch.where(torch.arange(values) % BLOCK == 0, 7.0, 0.51),
    }[weights]
    seen = learned + off * learned.norm() * torch.nn.functional.normalize(torch.randn(values), dim=0)
    for part in cuts(values):
        given = -rounded(learned[part] / rounds)
        assert misgiven({0: given.numpy()}, seen[part]) == ""
        later = 0.3 * learned.norm() * torch.nn.functional.normalize(torch.randn(len(given)), dim=0)
        before = later + learned[part]
        length = float(2 * off * 1e6 * learned.norm())
        assert misled(before + rounds * given, before, seen[part], length) == ""


def biased(learned: Tensor, by: float) -> Tensor:
    """What 4 bit make of it, one level off in so many values."""
    steps = learned.view(-1, BLOCK).abs().amax(dim=1).repeat_interleave(BLOCK) / 7
    return rounded(learned) + torch.where(torch.rand(learned.shape) < by, steps, 0.0)


def test_who_rounds_to_other_levels_in_4_bit_is_found() -> None:
    torch.manual_seed(0)
    learned = torch.randn(64 * BLOCK)
    later = torch.randn(64 * BLOCK)
    for by, is_found in ((0.0, False), (0.1, True)):
        given = biased(learned, by)
        assert bool(misgiven({0: -given.numpy()}, learned)) == is_found
        assert bool(misled(later + learned - given, later + learned, learned, 1.0)) == is_found


@pytest.mark.parametrize(
    ("seconds", "has_trained", "why"),
    [
        (0.0, True, "trains more than can be repeated here in 0 s"),
        (60.0, False, "has trained when nothing had been trained here"),
    ],
)
def test_what_the_owner_cannot_do_is_nobodys_fault(seconds: float, has_trained: bool, why: str) -> None:
    swarm = Swarm()
    found = TRUE
    swarm.auditor.seconds = seconds
    if not has_trained:
        swarm.auditor.state.optimizer.state.clear()
    while found.startswith(TRUE):  # a move of the common weights was drawn
        action, found = swarm.audited()
        assert action == "audited"
    assert found == why
    assert not swarm.auditor._times


def test_who_shows_weights_that_fit_what_it_has_given_is_held_to_its_digests() -> None:
    swarm = Swarm()
    shown = swarm.round_of(sent=torch.zeros_like, trains=False)  # as if it had learned nothing
    assert shown is not None
    weights = parameters_of(swarm.state.model, swarm.first)
    digests = digests_of(swarm.state.model, swarm.first)
    for shows, said in ((digests, "other digests"), (None, "other weights")):
        tensors = safetensors.torch.load(shown.data) | {"part.0": weights}
        if shows is not None:
            tensors["digests"] = torch.frombuffer(bytearray(shows), dtype=torch.uint8)
        verdict = swarm.verdict(shown._replace(data=safetensors.torch.save(tensors)))
        assert verdict.why.startswith(f"{OTHERWISE}: {said}")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"goes on": {"before": None}}, "has restarted with other weights than the run's"),
        ({"sums": None}, "continued from other weights than the run's"),
        ({"base": 77}, "continued from another round's weights"),
    ],
)
def test_of_what_cannot_be_compared_nothing_is_said(change: dict[str, Any], why: str) -> None:
    swarm = Swarm()
    swarm.round_of()
    shown = swarm.shown()
    account = shown.account
    if "base" in change:
        account = account.model_copy(update={"links": [link._replace(base=77) for link in account.links]})
    if "sums" in change:
        account = with_sums(account, lambda where: where[:, 3].mul_(1.01))
    shown = shown._replace(account=account, **change.get("goes on", {}))
    said = list[tuple[str, str]]()
    for swarm.owner.apart in (-9, -9, account.round, -9):  # the owner has gone its own way before the third
        verdict = swarm.verdict(shown)
        said.append((verdict.action, verdict.why.partition(";")[0]))
    assert said == [*[("audited", why)] * 3, ("left out", why)]


def first_doubt(swarm: Swarm, *, audits: int) -> str:
    """Words of the first of so many audits that is not true; of the last one if all are."""
    said = TRUE
    for _ in range(audits):
        said = swarm.audited()[1]
        if not said.startswith(TRUE):
            break
    return said


@pytest.mark.parametrize(
    ("cheat", "why"),
    [
        (other_labels, "has trained differently: "),
        (other_rates, "has trained with other learning rates than the run's"),
        (turned, "has neither the weights that it had trained nor the common ones"),
        (poisoned, "has trained differently: "),
        (leapt, "has trained differently: "),
        (forgetful, "has changed its optimizer without an update"),
    ],
)
def test_who_trains_otherwise_is_caught_when_that_is_drawn(cheat: Callable[[Swarm], None], why: str) -> None:
    swarm = Swarm()
    cheat(swarm)
    assert first_doubt(swarm, audits=200).startswith(why)  # one link of six is drawn in each


@pytest.mark.long
@pytest.mark.parametrize(("cheat", "share"), [(other_labels, 0.8), (leapt, 0.8), (poisoned, 0.8), (crept, 0.5)])
def test_cheats_are_caught_as_often_as_the_security_page_says(cheat: Callable[[Swarm], None], share: float) -> None:
    """In every second round; all the time, or in one of 12 stretches. One volunteer is drawn in each round."""
    caught = rounds = 0
    for _ in range(10):
        swarm = Swarm(seconds=1.4)
        swarm.audited()
        for _ in range(5):
            cheat(swarm)
            caught += swarm.audited()[0] != "audited"
            rounds += 1
            swarm.labels = lambda labels: labels
            swarm.after_update = lambda: None
            swarm.audited()
    print(f"caught in {caught} of {rounds}")
    assert abs(caught / rounds - share) < 0.2


def test_who_hides_where_it_has_ended_is_caught_by_audits_of_the_next_round() -> None:
    """It would have gone somewhere else after its last snapshot but one."""
    swarm = Swarm()
    said = list[str]()
    while len(said) < 100 and said[-1:] != ["has claimed another position than its own"]:
        swarm.round_of()
        told = swarm.accounts._last["ben"]
        swarm.accounts._last["ben"] = with_sums(told, lambda where: where[-1, 0].mul_(1.001))
        said.append(swarm.audited()[1].partition(";")[0])
    assert said[-1] == "has claimed another position than its own"


def test_nobody_is_asked_whose_account_does_not_go_on_from_the_last_one() -> None:
    """Else it could forget what it has done, and begin with an optimizer that nobody has trained."""
    swarm = Swarm()
    swarm.audited()
    swarm.journal._kept[-1] = replace(swarm.journal._kept[-1], link=swarm.journal._kept[-1].link._replace(position=3))
    assert swarm.round_of() is None
    assert swarm.audited()[0] == "audited"


def test_who_has_missed_a_round_is_asked_as_others_are() -> None:
    swarm = Swarm()
    swarm.audited()
    swarm.round += 3
    assert swarm.audited()[1].startswith(TRUE)


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, safetensors.torch.save({"rates": torch.zeros(1)})])
def test_garbage_in_the_place_of_snapshots_is_a_lie(data: bytes) -> None:
    swarm = Swarm()
    shown = swarm.shown()
    verdict = swarm.verdict(shown._replace(data=data))
    assert (verdict.action, OTHERWISE in verdict.why) == ("left out", True)


def as_file(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file, also of what older versions of the library do not write."""
    kinds = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL"}
    header = dict[str, Any]()
    body = b""
    for name, value in tensors.items():
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        places = [len(body), len(body) + len(data)]
        header[name] = {"dtype": kinds.get(value.dtype, "C64"), "shape": [*value.shape], "data_offsets": places}
        body += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    ("what", "rates"),
    [
        ("weights", torch.zeros(8, dtype=torch.float64)),
        *(("rates", of) for of in (torch.zeros(8, dtype=torch.complex64), torch.zeros(8, 2), torch.zeros(8).bool())),
    ],
)
def test_tensors_of_a_strange_kind_end_nobodys_training(what: str, rates: Tensor) -> None:
    """Also where they are what the peer had committed itself to."""
    swarm = Swarm()
    shown = swarm.shown()
    tensors = safetensors.torch.load(shown.data) | {"rates": rates}
    if what == "weights":
        tensors = {name: value.view(-1) if ".weights." in name else value for name, value in tensors.items()}
    verdict = swarm.verdict(shown._replace(data=as_file(tensors)))
    said = {"weights": "has shown the weights of another model"}.get(what, OTHERWISE)
    assert verdict.why.startswith(said)


@pytest.mark.parametrize("what", [0, 1, 2])
def test_who_says_that_a_snapshot_was_elsewhere_is_caught_when_it_shows_it(what: int) -> None:
    swarm = Swarm()
    swarm.round_of()  # its optimizer has nothing to remember before
    shown = swarm.shown()
    while shown.has_moved:
        shown = swarm.shown()
    (index,) = shown.wanted
    shown = shown._replace(account=with_sums(shown.account, lambda where: where[index, what].mul_(1.001)))
    verdict = swarm.verdict(shown)
    assert verdict.why.startswith("has claimed another position than its own")


def test_who_claims_micro_batches_that_cannot_be_does_not_escape() -> None:
    swarm = Swarm()
    verdict = Verdict("ben", "audited", TRUE)
    while verdict.why.startswith(TRUE):  # a move of the common weights was drawn
        shown = swarm.shown()
        verdict = swarm.verdict(shown._replace(account=shown.account.model_copy(update={"micro_batch_size": 7})))
    assert (verdict.action, verdict.why[:35]) == ("left out", "has trained in micro batches of 7, ")


@pytest.mark.parametrize("values", [7, 1000, 3 * PART, 2 * PART + 70])
def test_what_is_kept_in_8_bit_is_read_in_parts_as_it_was(values: int) -> None:
    torch.manual_seed(0)
    learned = torch.randn(values)
    squares = torch.cat([torch.rand(values - 3) ** 9, torch.tensor([0.0, 1e-30, 1.0])])
    for one, write, read, off in ((learned, coarse, exact, 0.02), (squares, coarse_squares, exact_squares, 0.065)):
        kept = write(one)
        assert len(kept) < 1.01 * values + 70
        found = read(kept, slice(0, values))
        assert float((found - one).norm()) < off * float(one.norm())
        for part in cuts(values):
            assert torch.equal(read(kept, part), found[part])
        with pytest.raises(ValueError, match=r"bytes|squares"):
            read(kept.float(), slice(0, values))
        with pytest.raises(ValueError, match=r"bytes|squares"):
            read(kept[:-1], slice(0, values))
    ratios = (found / squares)[squares > 1e-9]
    assert 0.93 < float(ratios.min()) < float(ratios.max()) < 1.07  # of small ones as of large ones
    assert (float(found[-3]), float(found[-2]) > 0.0) == (0.0, True)  # by which an optimizer divides


@pytest.fixture
def in_8_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshots of each model are as those of one with 88 million weights."""
    monkeypatch.setattr("trainkit.swarm.trust.accounts._MOST_BYTES", 1)


def of_large(**how: Any) -> Swarm:
    swarm = Swarm(wide=True, **how)
    swarm.accounts.received = {"ben": 1 << 40}  # it may always be asked
    return swarm


@pytest.mark.nightly
@pytest.mark.usefixtures("in_8_bit")
@pytest.mark.parametrize(("precision", "codec"), [("fp32", "8bit"), ("bf16", "8bit"), ("fp32", "4bit")])
def test_of_a_large_model_a_quarter_of_the_bytes_is_shown(precision: str, codec: Codec) -> None:
    swarm = of_large(precision=precision, codec=codec)
    kinds = set[bool]()
    for settles_after in 4 * (0, 5, 7, 3):
        shown = swarm.shown(settles_after=settles_after)
        kinds.add(shown.has_moved)
        assert len(shown.data) < 4.4 * swarm.common.theta.numel()  # a snapshot, and what was given
        assert swarm.verdict(shown).why.startswith(TRUE)
    assert kinds == {False, True}


@pytest.mark.nightly
@pytest.mark.usefixtures("in_8_bit")
@pytest.mark.parametrize(
    ("cheat", "why"),
    [
        (other_labels, "has trained differently: "),
        (other_rates, "has trained with other learning rates than the run's"),
        (turned, "has neither the weights that it had trained nor the common ones"),
        (poisoned, "has trained differently: "),
        (leapt, "has trained differently: "),
    ],
)
def test_of_a_large_model_cheats_are_found_as_well(cheat: Callable[[Swarm], None], why: str) -> None:
    swarm = of_large()
    cheat(swarm)
    assert first_doubt(swarm, audits=60).startswith(why)


@pytest.mark.usefixtures("in_8_bit")
@pytest.mark.parametrize("what", ["sums", "weights", "moments"])
def test_of_a_large_model_what_is_shown_is_held_to_the_account(what: str) -> None:
    swarm = of_large()
    swarm.round_of()
    shown = swarm.shown()
    while shown.has_moved:
        shown = swarm.shown()
    (index,) = shown.wanted
    tensors = safetensors.torch.load(shown.data)
    account = shown.account
    if what == "sums":
        account = with_sums(account, lambda where: where[index, 0].mul_(1.01))
    for name, value in tensors.items():
        if name.startswith(f"{index}.{what}.") and value.dtype == torch.uint8:
            value[len(value) // 2] += 1
    said = swarm.verdict(shown._replace(account=account, data=safetensors.torch.save(tensors))).why
    assert said.startswith("has claimed another position than its own" if what == "sums" else OTHERWISE)
