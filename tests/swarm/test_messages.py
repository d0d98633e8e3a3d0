"""What peers say of themselves, as readers may rely on it; anchors without data; and the clock of the rounds."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from trainkit.common import terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.config.loading import load, to_yaml
from trainkit.config.schema import Config
from trainkit.data.registry import build_data
from trainkit.models.library import build_model
from trainkit.run import code_files
from trainkit.swarm.identity.invitations import Key, grant, read_token, write_token
from trainkit.swarm.peer.same_run import (
    adapted,
    check_own,
    facts_of,
    no_data,
    require_collaborative,
    require_same,
    same_settings,
    without_data,
)
from trainkit.swarm.protocol import messages
from trainkit.swarm.protocol.addresses import EXAMPLE
from trainkit.swarm.protocol.messages import SHAPES, Manifest, PeerProgress, RoundClock, manifest_of, read_gathered

HONEST: dict[str, Any] = {
    "name": "ann@lab", "round": 3, "samples": 640, "samples_per_sec": 80.5, "loss": 1.25, "group": 4, "time": 1.7e9
}  # fmt: skip
INFINITE, NAN = float("inf"), float("nan")
READ = SHAPES[messages.PROGRESS][1].validate_python


def test_an_honest_record_is_read_also_of_a_later_version() -> None:
    assert READ({**HONEST, "mood": "good"}) == PeerProgress(**HONEST)


@pytest.mark.parametrize(
    "value",
    [
        *({**HONEST, "loss": lie} for lie in (INFINITE, NAN, 1e300, "1.0")),
        *({**HONEST, "samples_per_sec": lie} for lie in (1e300, -1.0)),
        *({**HONEST, "samples": lie} for lie in (-1, 1 << 60, 1.5, True)),
        *({**HONEST, **lie} for lie in ({"round": 1 << 80}, {"group": 1 << 30}, {"time": 1e300}, {"client": "yes"})),
        *({**HONEST, **lie} for lie in ({"val_headline": 1e300}, {"val_headline": "90"}, {"val_loss": NAN})),
        *({**HONEST, "name": lie} for lie in (5, "x" * 129)),
        *(None, [], "text", 5, {}, {"name": "ann"}),
    ],
)
def test_a_record_with_one_lie_in_it_is_none(value: object) -> None:
    with pytest.raises(ValidationError):
        READ(value)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b]0;owned\x07eve", "eve"),
        ("\x1b[2Jeve\r\nmallory\tx", "eve mallory x"),
        ("gpj.\u202eexe", "gpj.\N{REPLACEMENT CHARACTER}exe"),
        ("", "?"),
        ("\x1b[0m", "?"),
        ("z\u00fcrich \u6771\u4eac", "z\u00fcrich \u6771\u4eac"),
        ("x" * 128, terminal.name("x" * 128)),
    ],
)
def test_a_name_is_one_short_line_that_a_terminal_may_show(name: str, shown: str) -> None:
    assert READ({**HONEST, "name": name}).name == shown
    assert len(shown) <= terminal.LONGEST_NAME + 3


def test_a_run_of_another_version_is_refused_with_both() -> None:
    with pytest.raises(RefusedError, match="The swarm speaks version 99"):
        manifest_of({"Qm": replace(MANIFEST, protocol=99)})


@pytest.mark.parametrize("first", ["QmOld", "QmNew"])
def test_of_two_creators_the_one_that_was_started_last_counts(first: str) -> None:
    found = {"QmOld": replace(MANIFEST, since=10.0), "QmNew": replace(MANIFEST, since=20.0)}
    order = sorted(found, key=lambda peer: peer != first)
    assert manifest_of({peer: found[peer] for peer in order})[0] == "QmNew"


# What peers tell their group, from honest ones and from others.


def plain(value: Any) -> bytes:
    """As hivemind's serializer packs it, which is not imported here: that changes how a process starts others."""
    return bytes(msgpack.packb(value, use_bin_type=True, strict_types=True, default=as_tuple))


def as_tuple(value: Any) -> Any:
    return msgpack.ExtType(0x40, plain(list(value)))


def packed(*, bandwidth: Any = None, mode: Any = 1, **about: Any) -> bytes:
    return plain([bandwidth, mode, plain(about)])


def test_what_a_peer_of_ours_sends_is_read() -> None:
    found = read_gathered(packed(bandwidth=5.0, mode=0, rate=12.5, probe=b"\0" * 1024, later="field"))
    assert found is not None
    assert (found.bandwidth, found.mode, found.rate) == (5.0, messages.NODE, 12.5)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xc1garbage", b"\x91" * 4000),  # lists in lists
        *(plain(value) for value in (None, [None, 1], [None, 1, b"\xc1"], [None, 1, "text"], [None, 1, plain([1, 2])])),
        *(packed(**lie) for lie in ({"mode": 7}, {"mode": True}, {"probe": b"\0" * 1025})),
        packed(padding="x" * 5000),
        *(packed(bandwidth=value) for value in ("fast", -1.0, NAN, INFINITE)),
        *(packed(rate=value) for value in (INFINITE, 1e300, -1.0, "12", (1.0, 2.0))),  # an object of hivemind's own
        msgpack.packb([None, 1, msgpack.packb({"rate": msgpack.ExtType(0x50, b"\x00")})]),
    ],
)
def test_everything_else_is_nothing_and_raises_nothing(data: bytes) -> None:
    assert read_gathered(data) is None


# A peer that does not train builds the run's model without the run's data.

CONFIG = load("hivemind").config
MANIFEST = Manifest("id", "run", "", 1, "", num_classes=10, in_chans=1, image_size=8)


def facts_here(manifest: Manifest, theirs: dict[str, str], config: Config = CONFIG) -> dict[str, str]:
    """Of a machine without the data."""
    splits = no_data("digits", manifest)
    return without_data(facts_of(config, splits, build_model(config.model, splits.info, 0)), theirs, config)


@pytest.fixture(scope="module")
def theirs() -> dict[str, str]:
    """Of the creator, who has the digits."""
    splits = build_data(CONFIG.data)
    return facts_of(CONFIG, splits, build_model(CONFIG.model, splits.info, 0))


def test_its_model_is_the_runs_and_whatever_is_not_the_datas_must_be_alike(theirs: dict[str, str]) -> None:
    assert facts_here(MANIFEST, theirs) == theirs
    for key in theirs.keys() - {"data"}:
        told = {**theirs, key: "another"}
        with pytest.raises(RefusedError, match=f"differs from the run in: {key}"):
            require_same(told, facts_here(MANIFEST, told))
    sizes: tuple[dict[str, Any], ...] = ({"num_classes": 9}, {"in_chans": 3}, {"image_size": 16})
    for size in sizes:
        with pytest.raises(RefusedError, match="differs from the run in: model"):
            require_same(theirs, facts_here(replace(MANIFEST, **size), theirs))
    with pytest.raises(AssertionError, match="an anchor has no images"):  # nothing of it can be trained on
        no_data("digits", MANIFEST).eval_transform(None)


URL, COMMIT = "https://git.example/anna/kit", "ab" * 20
KIT = f"trainkit-vision @ git+{URL}@{COMMIT}"
OF_COMMIT = replace(MANIFEST, origin=f"commit {COMMIT} of {URL}", needs=[KIT, "torch==2.14.*", "torchvision==0.29.*"])


@pytest.mark.parametrize(
    ("different", "fix"),
    [
        (["code of trainkit"], f"python -m pip install --force-reinstall --no-deps '{KIT}'"),
        (["torch"], "python -m pip install 'torch==2.14.*' 'torchvision==0.29.*'"),
        (["data"], "Use the run's data set (data.root)"),
    ],
)
def test_a_refusal_names_the_commit_and_what_to_type(
    different: list[str], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_files, "INSTALLED", tmp_path)
    with pytest.raises(RefusedError) as refused:
        require_same(dict.fromkeys(different, "1"), dict.fromkeys(different, "2"), OF_COMMIT)
    assert refused.value.fix.startswith(fix)
    assert refused.value.why.endswith(f"1 in the run. The creator runs commit {COMMIT} of {URL}.")
    assert OF_COMMIT.way_to(["code of mine", "torch"]) == OF_COMMIT.way_to(["torch"])
    both = OF_COMMIT.way_to(["torch", "code of trainkit"])
    assert both == f"python -m pip install --force-reinstall --no-deps '{KIT}' && {OF_COMMIT.way_to(['torch'])}"
    (tmp_path / ".git").touch()  # of a checkout, which comes before what pip installs
    git = f"git -C {tmp_path}"
    assert OF_COMMIT.way_to(["code of trainkit"]) == f"{git} fetch {URL} {COMMIT} && {git} checkout {COMMIT}"


def test_a_manifest_of_a_later_version_still_says_what_to_install() -> None:
    later = {**asdict(OF_COMMIT), "owner": "ab" * 32, "protocol": messages.PROTOCOL + 1, "what_nobody_knows_yet": [5]}
    told = SHAPES[messages.MANIFEST][1].validate_python(later)
    with pytest.raises(
        RefusedError, match=f"(?s)speaks version {messages.PROTOCOL + 1}.*runs commit {COMMIT}.*{COMMIT}"
    ):
        manifest_of({"Qm": told})


@pytest.mark.parametrize(
    "hostile",
    [
        *("--index-url=https://evil.example", "torch==2.14.* --pre", "torch", "requests==2.0", "torch==2.14.*\n-r x"),
        *(KIT.replace(URL, url) for url in (f"{URL}/../x", f"{URL}/-x", f"{URL}?a=$(id)", f"{URL}#egg=x", f"{URL} x")),
        *(KIT.replace("https://", start) for start in ("http://", "ssh://", "file://", "https://me:pw@", "https://-x")),
        *(KIT.replace(COMMIT, commit) for commit in ("main", COMMIT[1:], f"{COMMIT};id")),
        KIT.replace("kit", "k" * 300),
    ],
)
def test_nothing_is_installed_from_elsewhere_than_a_plain_public_place(hostile: str) -> None:
    with pytest.raises(ValueError):
        SHAPES[messages.MANIFEST][1].validate_python({**asdict(OF_COMMIT), "owner": "ab" * 32, "needs": [hostile]})
    own = grant(Key(b"o" * 32), "run", "anna", "volunteer", 2e9)
    assert read_token(write_token(own, [EXAMPLE], OF_COMMIT.needs))[1] == (EXAMPLE,)
    with pytest.raises(UserError, match="This is not a token"):
        read_token(write_token(own, [EXAMPLE], [*OF_COMMIT.needs, hostile]))


@pytest.mark.parametrize(
    ("data", "model", "kept"), [("mine:data", "fashion_cnn", {"code of mine"}), ("digits", "mine:model", set())]
)
def test_code_of_a_data_set_need_not_be_there_but_a_models_must(data: str, model: str, kept: set[str]) -> None:
    parts = {
        "data": CONFIG.data.model_copy(update={"name": data}),
        "model": CONFIG.model.model_copy(update={"name": model}),
    }
    found = without_data({}, {"data": "x", "code of mine": "y", "seed": "0"}, CONFIG.model_copy(update=parts))
    assert found.keys() == {"data"} | kept


CLOCK = RoundClock(seconds=10.0, first=100, count=3)  # rounds end at 1010, 1020 and 1030


def test_the_round_and_the_rate_follow_from_the_time() -> None:
    times = (900.0, 1000.0, 1009.9, 1010.0, 1015.0, 1029.9, 1030.0, 9999.0)
    assert [CLOCK.index(now) for now in times] == [0, 0, 0, 1, 1, 2, 3, 3]
    steps = [CLOCK.grid(now, epochs=20) for now in times]
    assert [steps[place][0] for place in (0, 1, 4, 6, 7)] == [0, 0, 10_000, 19_999, 19_999]
    assert {(per_epoch, total) for _, per_epoch, total in steps} == {(1000, 20_000)}


def test_all_who_join_in_the_first_round_have_the_clock_of_the_creator() -> None:
    clocks = {RoundClock.starting(now, 10.0, 3) for now in (1000.0, 1003.0, 1009.9)}
    assert clocks == {RoundClock(10.0, first=101, count=3)}
    assert RoundClock.starting(1010.0, 10.0, 3) not in clocks
    (joined,) = clocks  # whose first round lasts at least its length
    assert [joined.index(now) for now in (1000.0, 1019.9, 1020.0, 1029.9, 1030.0, 1040.0)] == [0, 0, 1, 1, 2, 3]
    assert (joined.boundary(0), joined.end, joined.boundary(2)) == (1020.0, 1040.0, 1040.0)


def test_a_run_that_goes_on_starts_with_the_round_after_those_that_are_done() -> None:
    clock = RoundClock.starting(1003.0, 10.0, 5, done=2)
    assert clock.index(1003.0) <= 2
    assert clock.boundary(2) - 1003.0 >= 10.0


# What a machine makes of the settings in a manifest.


def config(*overrides: str) -> Config:
    return load("hivemind", overrides).config


def test_a_joiner_takes_the_runs_settings_with_its_own_data_and_gpu() -> None:
    check_own(["data.root=/mine", "train.micro_batch_size=8", "monitor.log_every=3"])
    theirs = config("data.root=/creator/data", "launch.gpus_per_node=0", "data.workers=7", "optim.lr=0.123", "seed=5")
    own = adapted(to_yaml(theirs), ["data.root=/mine"], allow_code=False)
    assert (own.data.root, own.launch.gpus_per_node, own.data.workers) == ("/mine", "auto", "auto")
    assert (own.optim.lr, own.seed) == (0.123, 5)


UNPICKLED = ("model.name=resnet18", "model.pretrained_cfg_overlay={file: /w/w.bin}")


CODE = ("model.name=os:system", "data.name=runpy:run_path", "monitor.loggers=[os:system]", "strategy.name=theirs:build")


@pytest.mark.parametrize("overrides", [*((one,) for one in CODE), UNPICKLED])
def test_code_that_a_manifest_names_is_run_only_with_leave(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text('LOOP = "collaborative"\ndef build(dist): ...\n')
    monkeypatch.chdir(tmp_path)
    text = to_yaml(config(*overrides))
    with pytest.raises(UserError, match="code of its creator"):
        adapted(text, (), allow_code=False)
    assert adapted(text, (), allow_code=True)


def test_a_joiner_starts_nothing_and_sends_nowhere_for_the_creator() -> None:
    """Whose bucket, project and set-up they are, a manifest does not say."""
    places = ("checkpoint.remote=s3://theirs/all", "monitor.wandb_project=theirs", "launch.mail_user=them")
    commands = ("launch.setup=[theirs]", "launch.sbatch={comment: theirs}", "script.program=theirs")
    text = to_yaml(config(*places, *commands))
    own = adapted(text, (), allow_code=True)
    assert "theirs" not in to_yaml(own)
    assert own.launch.mail_user is None
    assert adapted(text, ["monitor.wandb_project=mine"], allow_code=False).monitor.wandb_project == "mine"


@pytest.mark.parametrize("text", ["seed: [", "seed: 0\nnonsense: 1\n", "strategy: {name: ddp}\n"])
def test_a_manifest_that_is_no_collaborative_configuration_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        adapted(text, (), allow_code=False)


def test_options_of_the_strategy_are_checked() -> None:
    with pytest.raises(UserError, match=r"strategy\.bucket_cap_mb"):
        require_collaborative(config("strategy.bucket_cap_mb=1"))


def test_a_job_that_joins_says_where_its_settings_differ() -> None:
    theirs = to_yaml(config("collaborative.rounds=7", "data.root=/elsewhere"))
    assert same_settings(config("collaborative.rounds=7", "data.root=/here"), theirs)
    with pytest.raises(UserError) as caught:
        same_settings(config("collaborative.rounds=8"), theirs)
    assert caught.value.fix == "Submit with collaborative.rounds=7."


def test_each_peer_has_a_micro_batch_of_its_own_that_divides_the_update() -> None:
    theirs = to_yaml(load("hivemind").config)
    assert adapted(theirs, ["train.micro_batch_size=16"], allow_code=False).train.micro_batch_size == 16
    with pytest.raises(UserError, match=r"not a multiple of train\.micro_batch_size=100"):
        adapted(theirs, ["train.micro_batch_size=100"], allow_code=False)
