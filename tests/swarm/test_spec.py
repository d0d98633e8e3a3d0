from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.config.loading import load, to_yaml
from trainkit.config.schema import Config
from trainkit.errors import UserError
from trainkit.ranks import RankEnv
from trainkit.swarm.address import PeerSpec, check_peer
from trainkit.swarm.messages import adapted, check_own, require_collaborative, same_settings


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
    commands = ("launch.setup=[theirs]", "launch.sbatch={comment: theirs}")
    text = to_yaml(config(*places, *commands, "collaborative.open=true"))
    own = adapted(text, (), allow_code=True)
    assert "theirs" not in to_yaml(own)
    assert own.launch.mail_user is None
    assert own.collaborative.open, "what all peers have in common stays"
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


@pytest.mark.parametrize(
    ("ranks", "max_upload", "says"),
    [(2, None, "A peer of 2 ranks cannot take part"), (1, 1e6, "--max-upload does not go with")],
)
def test_what_a_peer_that_averages_gradients_cannot_do_is_refused(
    ranks: int, max_upload: float | None, says: str
) -> None:
    spec = PeerSpec("me", replace(RankEnv.single(), world_size=ranks), team=True, max_upload=max_upload)
    with pytest.raises(UserError, match=says):
        check_peer(load("hivemind_gradients").config, spec)
    check_peer(config(), spec)


def test_each_peer_has_a_micro_batch_of_its_own_that_divides_the_update() -> None:
    theirs = to_yaml(load("hivemind_gradients").config)
    assert adapted(theirs, ["train.micro_batch_size=256"], allow_code=False).train.micro_batch_size == 256
    with pytest.raises(UserError, match=r"not a multiple of train\.micro_batch_size=100"):
        adapted(theirs, ["train.micro_batch_size=100"], allow_code=False)
