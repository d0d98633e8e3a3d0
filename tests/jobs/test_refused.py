"""What each verb refuses at once: in three lines, with its exit code, and before anything is written."""

import shlex
from pathlib import Path

import pytest

from tests.jobs.conftest import Command, make_run
from trainkit.bench.base import BenchRequest
from trainkit.swarm.identity.invitations import Key, grant, write_token
from trainkit.swarm.network import processes
from trainkit.swarm.protocol.addresses import EXAMPLE

TWO_NODES = "launch ddp --nodes 2 --master-addr"
ALONE = "launch single --gpus-per-node 0 --dry-run"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("__main__ sumbit ddp", 2, "Did you mean 'submit'?"),
        ("evaluate", 2, "RUN missing."),
        ("evaluate run --checkpoint", 2, "--checkpoint: expected one argument."),
        ("evaluate run --weights rwa", 2, "Did you mean 'raw'?"),
        ("swarm", 2, "One of create, invite, "),
        ("cluster", 2, "One of discover, "),
        ("cluster discover ../mine", 2, "'../mine'"),
        ("cluster discover", 3, "there is no scontrol on this machine"),
        ("train single model.checkpoint=nowhere.pth --run-dir here", 2, "There is no file nowhere.pth"),
        ("train single data.augmnt=true --run-dir here", 2, "Did you mean 'data.augment'?"),
        # submit
        ("submit ddpp", 2, "Did you mean 'ddp'?"),
        ("submit ddp optim.wieght_decay=1", 2, "Did you mean 'optim.weight_decay'?"),
        ("submit ddp --nodes 0", 2, "--nodes"),
        ("submit ddp --node 2", 2, "Did you mean '--nodes'?"),
        ("submit ddp --zzz", 2, "`python -m jobs.submit --help` lists the flags."),
        ("submit ddp --nodes", 2, "--nodes/-N: expected one argument."),
        ("submit ddp --sbatch =3", 2, "has no key"),
        ("submit ddp --executor slrum", 2, "Did you mean 'slurm'?"),
        ("submit ddp --cluster nosuch", 2, "Unknown cluster profile"),
        ("submit ddp --nodes 3", 2, "global_batch_size=63 or 66"),
        ("submit ddp train.global_batch_size=1260", 2, "Use train.global_batch_size=1024, or more data."),
        ("submit ddp model.name=resnet5", 2, "Unknown model 'resnet5'"),
        ("submit single --nodes 2", 2, "one process"),
        ("submit ddp data.name=cifar10 data.root=nosuch", 2, "jobs.prepare cifar10"),
        ("submit --join token", 2, "PRESET|RUN missing"),
        ("submit hivemind --join token --array 0-3", 2, "--array: invalid int value"),
        ("submit broken.yaml", 2, "broken.yaml:2"),
        ("submit nosuch.yaml", 2, "No file"),
        ("submit ddp --run-dir taken", 2, "exists already"),
        ("submit ddp --run-dir ''", 2, "The name of the folder is empty"),
        ("submit ddp --run-dir file/run", 2, "Cannot make the run folder"),
        ("submit ddp --run-dir /dev/shm/trainkit-no-such-run --executor slurm", 3, "no SLURM on this machine"),
        ("submit ddp --sweep seed=1,2 --run-dir taken", 2, "File exists"),
        ("submit ddp --sweep seed=1,x", 2, "seed"),
        ("submit ddp --sweep seed", 2, "has no values"),
        ("submit ddp --sweep launch.nodes=1,2", 2, "cannot change resources"),
        ("submit ddp --sweep seed=4..0", 2, "no such range"),
        ("submit ddp --sweep seed=0..99999999", 2, "no such range"),
        ("submit ddp --sweep optim.lr=1e-4..1e-3", 2, "is a range to draw from"),
        ("submit ddp --sweep seed=0..999 --sweep optim.lr=1,2,3,4,5,6,7,8,9,10,11", 2, "11000 runs"),
        ("submit ddp --nodes 2 --gpus-per-node 4", 3, "ddp_sim"),
        ("submit ddp --estimate", 3, "There is no SLURM on this machine."),
        # predict
        ("predict ddp-0001 nowhere", 2, "There is no folder nowhere"),
        ("predict ddp-0001 taken", 2, "taken holds no images"),
        ("predict ddp-0001 pictures --batch-size 0", 2, "--batch-size: '0' is not 1 or more"),
        ("predict ddp-0001 pictures --top 0", 2, "--top: '0' is not 1 or more"),
        ("predict ddp-0001 pictures --speed 1,many", 2, "--speed: 'many' is not 1 or more"),
        # prepare
        ("prepare imagnet", 2, "Did you mean 'imagenet'?"),
        ("prepare cifar10 --archive nosuch.tar", 2, "There is no file nosuch.tar"),
        ("prepare cifar10 --archive file", 2, "file is not used"),
        # launch
        ("launch ddp-0001 seed=1", 2, "its settings are its own"),
        ("launch ddp --nodes 2", 2, "--master-addr is missing"),
        (f"{TWO_NODES} 127.0.0.1 --node-rank 1", 2, "--secret-file is missing"),
        (f"{TWO_NODES} 127.0.0.1 --node-rank 2", 2, "Nodes are numbered from 0."),
        (f"{TWO_NODES} no.such.host.invalid", 2, "cannot be found"),
        ("launch ddp --gpus-per-node 1", 3, "--gpus-per-node 0"),
        (f"{ALONE} --secret known-to-all", 2, "Unrecognized arguments: --secret"),
        (f"{ALONE} --secret-file open", 2, "Others can read"),
        (f"{ALONE} --secret-file short", 2, "too short"),
        (f"{ALONE} --secret-file long", 2, "Cannot read"),
        (f"{ALONE} --secret-file nosuch", 2, "Cannot read"),
        # bench, which is not gone on with
        ("resume bench", 2, "bench is a bench, which cannot be continued.\n  why: "),
        ("train bench", 2, "bench is a bench, which cannot be continued.\n  why: "),
        ("submit ./bench", 2, "bench is a bench, which cannot be continued.\n  why: "),
        ("launch bench --nodes 1", 2, "bench is a bench, which cannot be continued.\n  why: "),
        ("bench", 2, "NAME missing."),
        ("bench ampp", 2, "Unknown bench 'ampp'."),
        ("bench amp --arms fp32,fp64", 2, "'fp64' is not an arm of bench amp."),
        ("bench amp --arms fp32,fp32", 2, "--arms names an arm twice."),
        ("bench amp --rounds 1", 2, "--rounds 1 is not possible."),
        ("bench amp --rounds x", 2, "--rounds: invalid int value: 'x'."),
        ("bench amp hivemind", 2, "Bench amp cannot measure strategy.name=hivemind."),
        ("bench scaling", 2, "Bench scaling needs 2 ranks or more; this job has 1."),
        ("bench batch-size --arms large", 2, "'large' is not an arm of bench batch-size."),
        ("bench --show nowhere", 2, "No run 'nowhere'."),
        ("bench amp --show nowhere", 2, "--show takes no other words."),
        (f"submit hivemind collaborative.initial_peers=[{EXAMPLE}]", 2, "There is no token in TRAINKIT_TOKEN."),
        # swarm
        ("swarm creat hivemind", 2, "'creat' is not possible."),
        ("swarm create hivemnd", 2, "Unknown preset 'hivemnd'."),
        ("swarm create ddp", 2, "strategy.name=ddp is not a collaborative run."),
        ("swarm create hivemind collaborative.round_seconds=2", 2, "collaborative.round_seconds=2 leaves no time"),
        ("swarm create hivemind collaborative.initial_peers=[x]", 2, "collaborative.initial_peers is set"),
        ("swarm create hivemind --port 70000", 2, "--port 70000 does not exist."),
        ("swarm invite anna --expires 367d", 2, "--expires 367d is not a duration."),
        ("swarm invite anna --expires 7", 2, "--expires 7 is not a duration."),
        ("swarm status", 2, "No swarm in"),
        ("swarm status nonsense", 2, "No run 'nonsense'."),
        ("swarm status ddp-0001", 2, "ddp-0001 has no address yet."),
        (f"swarm status {EXAMPLE}", 2, "No run"),
        ("swarm create hivemind collaborative.open=true", 2, "collaborative.open=true does not go with"),
        # join
        ("join", 2, "There is no token in TRAINKIT_TOKEN."),
        (f"join {EXAMPLE}", 2, "There is no token in TRAINKIT_TOKEN."),
        ("join 203.0.113.7:4711", 2, "There is no token in what was given."),
        (f"join TOKEN {EXAMPLE[:-1]}", 2, f"'{EXAMPLE[:-1]}' is not the address of a peer."),
        ("join trainkit1.nonsense", 2, "This is not a token."),
        ("join trainkit1.nonsense trainkit1.more", 2, "This is not a token."),
        ("join TOKEN optim.lr=1", 2, "'optim.lr' cannot be set by a peer that joins."),
        ("join TOKEN --public --port -1", 2, "--port -1 does not exist."),
        ("join TOKEN --port 4711", 2, "Others can only connect to peers that the owner trusts."),
    ],
    ids=lambda value: value.removesuffix(".") if isinstance(value, str) else "",
)
def test_wrong_words_are_answered_in_three_lines_and_write_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, says: str
) -> None:
    monkeypatch.setattr(processes, "require_hivemind", lambda: pytest.fail("nothing is wrong with these words"))
    make_run(tmp_path / "runs" / "ddp-0001")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "config.yaml").write_text("{}")
    (tmp_path / "bench" / "bench.json").write_text(BenchRequest("amp", "ddp").to_json())
    (tmp_path / "broken.yaml").write_text("model: {name: fashion_cnn}\n]: x\n")
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x.png").write_bytes(b"")
    for name, times, mode in (("open", 5, 0o644), ("short", 1, 0o600), ("long", 600, 0o600)):
        (tmp_path / name).write_text("swordfish" * times)
        (tmp_path / name).chmod(mode)
    before = sorted(tmp_path.rglob("*"))
    token = write_token(grant(Key(b"o" * 32), "hivemind-0001", "anna", "volunteer", 1.9e9), [EXAMPLE])
    done = command(*shlex.split(words.replace("TOKEN", token))).refused(code, says)
    assert done.out == ""
    assert [line.split(":")[0] for line in done.err.splitlines()[-2:]] == ["  why", "  fix"]
    assert "swordfish" not in done.err, "no secret is shown"
    assert sorted(tmp_path.rglob("*")) == before
