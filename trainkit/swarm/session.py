"""What every peer of a swarm is made of, and what it must have alike with the others.

A *session* is built step by step, and taken down in reverse. Its ranks, if it has several GPUs, are one peer to the
swarm: rank 0 speaks for it, and alone knows the swarm, watches the clock, hears the signals and keeps the records.
Before every update it tells the others that there is one, and with which learning rate; they train with it by DDP, and
know nothing of rounds. Where the swarm has changed rank 0's weights, they get the very same bits before they go on.

What peers must have alike beyond the settings, or their averages would mean nothing, the creator publishes with the
run; a peer that joins compares it with its own before it averages with anybody.
"""

import hashlib
import json
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from torch import nn

from trainkit import fileio, plugins
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Batch, Samples, Splits, derive_seed
from trainkit.data.loader import Batches
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import RefusedError, RunFailedError
from trainkit.models import build_model
from trainkit.monitor import open_loggers
from trainkit.monitor.hardware import sample_hardware
from trainkit.run import snapshot
from trainkit.run.events import Attempt, Remark
from trainkit.run.metrics import Counted
from trainkit.strategies import AsItIs
from trainkit.swarm import access, address, processes
from trainkit.swarm.accounts import Journal, num_stretches
from trainkit.swarm.address import Hooks, PeerSpec, SavedPeer, keep_identity, known_of, peer_of, write_addresses
from trainkit.swarm.admission import Admission
from trainkit.swarm.average import Averaging, Link, Trial, open_averager
from trainkit.swarm.dht import Watch, open_dht
from trainkit.swarm.diloco import OuterState, unflattened
from trainkit.swarm.invitations import Pass, pack
from trainkit.swarm.messages import CODE, Manifest, RoundClock, load_text
from trainkit.swarm.records import PeerRound, Role, RoundRecorder
from trainkit.swarm.robust import Sentry
from trainkit.tasks.meter import Meter
from trainkit.training.build import TrainState, alone, build, wants_gpu
from trainkit.training.memory import check_batch_sizes
from trainkit.training.recorder import Progress, Recorder
from trainkit.training.update import Updater

PATIENCE = timedelta(hours=1)
"""How long ranks wait for rank 0, which validates, saves and meets others meanwhile. A death is noticed at once."""
_FOREVER = 1 << 40
ASK_SECONDS = 10.0
"""How long one peer is asked for a state; meanwhile who asks hears nothing."""
# What rank 0 tells the others: one of these, an integer (the batch to load from, a seed) and a learning rate.
_ORDER = struct.Struct("<BQd")
_LEAVE, _BEGIN, _TAKE_WEIGHTS, _UPDATE, _READ_METER = range(5)


@dataclass
class Team:
    """Rank 0's hand on the others; of a peer with one rank, nobody's."""

    state: TrainState
    """What trains: spread over the ranks."""
    judge: TrainState
    """The same model for rank 0 alone, which validates and saves while the others wait."""
    common: OuterState
    _seen: int = field(default=-1, init=False)
    """Version of the weights that all have."""

    @property
    def size(self) -> int:
        """Ranks."""
        return self.state.dist.world_size

    def batches(self, seed: int, position: int) -> Batches[Batch]:
        """This rank's batches, from global batch ``position`` on; the others load theirs."""
        self.order(_BEGIN, position)
        return self.state.batches(position, _FOREVER, seed=seed)

    def before_update(self, lr: float, seed: int) -> None:
        """Tell the others to make the update that this rank makes next."""
        if self.size > 1 and self._seen != self.common.version:
            self.order(_TAKE_WEIGHTS)
            _share_weights(self.judge.model)
            self._seen = self.common.version
        self.order(_UPDATE, seed, lr)

    def read(self, meter: Meter) -> dict[str, float]:
        """What has been measured on all ranks."""
        self.order(_READ_METER)
        return meter.read()

    def order(self, what: int, number: int = 0, rate: float = 0.0) -> None:
        """Tell the other ranks, if there are any."""
        if self.size > 1:
            order = bytearray(_ORDER.pack(what, number, rate))
            c10d.broadcast(torch.frombuffer(order, dtype=torch.uint8), src=0)


def data_seed(config: Config, peer_id: str) -> int:
    """Every peer has a data order of its own, so that together they see more than each alone."""
    return derive_seed(config.seed, int(hashlib.sha256(peer_id.encode()).hexdigest(), 16))


@contextmanager
def together(size: int) -> Iterator[None]:
    """Say in words that another rank has died, which c10d tells by the text of a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if size == 1 or not any(word in str(error) for word in ("gloo", "NCCL", "ProcessGroup", "onnection")):
            raise
        raise RunFailedError(
            "A rank of this peer has died.",
            why=f"{str(error).strip().splitlines()[0][:200]}.",
            fix="See the other ranks' logs; most often memory ran out. The swarm goes on without this peer.",
        ) from None


@contextmanager
def spread(config: Config, dist: Distributed, splits: Splits, common: OuterState, identity: str) -> Iterator[Team]:
    """Rank 0's part: the others are told what is trained, and at the end to leave.

    Args:
        identity: what makes this peer's data order its own.

    Raises UserError when a global batch cannot be divided among the ranks.
    """
    if dist.world_size == 1:
        state = build(alone(config), dist, splits, model=common.model)
        yield Team(state, state, common)
        return
    check_batch_sizes(config, dist.world_size, splits)
    dist.broadcast_json({"config": to_yaml(config), "identity": identity})
    state = build(_as_ddp(config), dist, splits, model=common.model)
    solo = Distributed(replace(dist.env, rank=0, world_size=1), dist.device)
    judge = replace(state, config=alone(config), dist=solo, model=common.model, strategy=AsItIs())
    team = Team(state, judge, common)
    try:
        yield team
    finally:
        with suppress(RuntimeError):  # a rank that has died does not hear it
            team.order(_LEAVE)


def follow(dist: Distributed, *, beat: Callable[[], None] = lambda: None) -> nn.Module:
    """Any other rank: do what rank 0 says, until it says that this is all. The model that it has trained.

    Raises RunFailedError when rank 0 has died.
    """
    with together(dist.world_size), ExitStack() as loading:
        told: dict[str, Any] = dist.broadcast_json({})
        # Rank 0, who knows the secret, has asked whether its code may be run.
        config = load_text(told["config"]).config
        splits = build_data(config.data)
        model = build_model(config.model, splits.info, config.seed)
        state = build(_as_ddp(config), dist, splits, model=model)
        seed, updater = data_seed(config, told["identity"]), Updater(state, beat=beat)
        batches: Iterator[Batch] = iter(())
        order = torch.empty(_ORDER.size, dtype=torch.uint8)
        while True:
            c10d.broadcast(order, src=0)
            what, number, rate = _ORDER.unpack(order.numpy().tobytes())
            if what == _LEAVE:
                return model
            beat()
            if what == _BEGIN:
                loading.close()
                batches = loading.enter_context(state.batches(number, _FOREVER, seed=seed))
                updater = Updater(state, beat=beat)
                state.model.train()
            elif what == _TAKE_WEIGHTS:
                _share_weights(model)
            elif what == _UPDATE:
                updater(batches, lr=rate, seed=number)
            elif what == _READ_METER:
                updater.meter.read()


def _as_ddp(config: Config) -> Config:
    return config.model_copy(update={"strategy": type(config.strategy)(name="ddp")})


@torch.no_grad()
def _share_weights(model: nn.Module) -> None:
    """Rank 0's weights and buffers, bit for bit, in the model of every rank."""
    tensors = [*model.parameters(), *model.buffers()]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        sent = torch.cat([tensor.reshape(-1) for tensor in same])
        c10d.broadcast(sent, src=0)
        for tensor, part in unflattened(sent, same):
            tensor.copy_(part)


# What every peer of a run must have alike, beyond the settings.

_PACKAGE = Path(__file__).resolve().parents[1]
# Samples, evenly spaced, that tell one data set from another.
_SAMPLES = 16
# The third digit of their versions mends errors, and does not change what is computed.
_LIBRARIES = ("torch", "hivemind")
_MODEL_LIBRARIES = ("timm", "torchvision")
TRIED = frozenset(("torch", *_MODEL_LIBRARIES))
"""Facts that may differ where an audit by replay shows whether that matters."""
_DATA = "data"
# The code that makes updates, and the code that averages them.
_ROOMS = ("data", "models", "tasks", "training")
_ROUNDS = ("accounts", "averager", "diloco", "exchange", "messages", "replay")


def facts_of(config: Config, splits: Splits, model: nn.Module) -> dict[str, str]:
    """One line for each, as the user sees it."""
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    size = sum(parameter.numel() for parameter in model.parameters())
    libraries = {type(part).__module__.partition(".")[0] for part in model.modules()}
    return {
        "model": f"{size:,} parameters in {len(shapes)} tensors ({_hash([repr(shapes).encode()])})",
        _DATA: _data(splits),
        "seed": str(config.seed),
        **code_facts(_PACKAGE, [config.model.name, config.data.name, config.task.name]),
        **installed(),
        **{name: metadata.version(name).split("+")[0] for name in _MODEL_LIBRARIES if name in libraries},
    }


def without_data(ours: Mapping[str, str], theirs: Mapping[str, str], config: Config) -> dict[str, str]:
    """``ours`` of a peer that does not train: what only says which data set it is, is the run's."""
    about = {_DATA, CODE + config.data.name.partition(":")[0]} - {CODE + config.model.name.partition(":")[0]}
    kept = {key: value for key, value in ours.items() if key not in about}
    return kept | {key: value for key, value in theirs.items() if key in about}


def installed() -> dict[str, str]:
    """Versions of the libraries that every run needs, by which what is computed may change."""
    return {name: _minor(name) for name in _LIBRARIES}


def _minor(library: str) -> str:
    return ".".join(metadata.version(library).split("+")[0].split(".")[:2])


def provenance(facts: Mapping[str, str]) -> tuple[str, list[str]]:
    """Which trainkit this is, in words; and what pip installs elsewhere so that a peer there has these ``facts``."""
    rounds = (f"swarm/{name}.py" for name in _ROUNDS)
    words, kit = snapshot.origin([f"{_PACKAGE.name}/{name}" for name in (*_ROOMS, *rounds)])
    # A release of torchvision fits one of torch.
    libraries = {name: f"{_minor(name)}.*" for name in (*_LIBRARIES, "torchvision")}
    libraries |= {name: facts[name] for name in _MODEL_LIBRARIES if name in facts}
    return words, [*filter(None, [kit]), *(f"{name}=={it}" for name, it in libraries.items())]


def parameters_in(facts: Mapping[str, str]) -> int:
    """How many the run's model has; 0 if that is not said."""
    number = facts.get("model", "").partition(" ")[0].replace(",", "")
    return int(number) if number.isdecimal() else 0


def untried(manifest: Manifest, values: int, *, is_volunteer: bool) -> str:
    """Why no audit can show that a peer's other libraries train as the run's do; empty if one can."""
    if not manifest.trains:
        return "the run's creator does not train"
    if not num_stretches(values):
        return "the model is too large for that"
    return "" if is_volunteer else "only the work of volunteers is looked at"


def require_same(
    theirs: Mapping[str, str], ours: Mapping[str, str], manifest: Manifest | None = None, why_not: str | None = None
) -> str:
    """Refuse to take part with something else than the run has.

    Args:
        manifest: the run's, which says how to have the same.
        why_not: empty: other versions of torch and of libraries of models are no reason, for audits look at what they
            compute; else why they are, see `untried`.

    Returns such versions, in words; empty if they are the same.

    Raises RefusedError that names everything in which they differ.
    """
    different = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    said = "; ".join(f"{key}: {ours.get(key, 'none')} here, {theirs.get(key, 'none')} in the run" for key in different)
    if not different or (why_not == "" and TRIED.issuperset(different)):
        return said
    if why_not and not TRIED.isdisjoint(different):
        said += f". Whether other libraries train alike cannot be seen here: {why_not}"
    raise RefusedError(
        f"This peer differs from the run in: {', '.join(different)}.",
        why=f"{said}.{manifest.runs() if manifest is not None else ''}",
        fix=(manifest.way_to(different) if manifest is not None else "")
        or "Use the very same: data set in data.root, version of trainkit and of the creator's own code, libraries.",
    )


def meeting_place(run_id: str, facts: Mapping[str, str]) -> str:
    """Where peers of a run look for each other: those that differ in what matters never meet."""
    return f"{run_id}-{_hash([json.dumps(dict(facts), sort_keys=True).encode()])}"


def _data(splits: Splits) -> str:
    info = splits.info
    about = [repr((info.class_names, info.num_classes, info.in_chans, info.image_size)).encode()]
    for samples in (splits.train, splits.val, splits.test):
        about += [str(len(samples)).encode(), *_some(samples)]
    return f"{info.name}, {len(splits.train):,} samples to train on, {info.num_classes} classes ({_hash(about)})"


def _some(samples: Samples) -> Iterator[bytes]:
    for index in sorted({place * len(samples) // _SAMPLES for place in range(_SAMPLES)} if len(samples) else ()):
        try:
            image, label = samples[index]
        except (OSError, ValueError):  # an image that cannot be decoded is so everywhere
            yield b"broken"
            continue
        yield str(int(label)).encode()
        # Decoders of JPEG differ in the last bit; bytes count only where nothing was decoded.
        yield image.numpy().tobytes() if hasattr(image, "numpy") else repr(image.size).encode()


def code_facts(package: Path, names: Iterable[str]) -> dict[str, str]:
    """Hashes of the code that decides what is computed: in the kit, and in a user's modules that the run ``names``.

    The rest of the kit may differ: what peers say to one another has a version of its own, `messages.PROTOCOL`.
    """
    kit = [file for room in _ROOMS for file in sorted((package / room).rglob("*.py"))]
    found = {f"{CODE}trainkit": [*kit, *(package / "swarm" / f"{name}.py" for name in _ROUNDS)]}
    for module in sorted(name.partition(":")[0] for name in names if ":" in name):
        if (file := plugins.find_module(module)) is not None:
            found[CODE + module] = [file]
    return {key: _hash(fileio.read_bytes(file, follow=True) for file in files) for key, files in found.items()}


def _hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(pack(list(parts))).hexdigest()[:12]


# Rounds without an average and without news of anybody after which the swarm is lost.
LOST_AFTER = 3


class Session:
    """One peer's part in one run: all that the training loop works on.

    Each step needs those before it; what a step opens, ``held`` closes.
    """

    may_be_alone = False
    """A peer that others can reach waits for them where it is; to anybody else silence means that the swarm is gone."""

    config: Config
    clock: RoundClock
    watch: Watch
    writer: Attempt
    others: tuple[str, ...] = ()
    """Addresses of peers to turn to when the swarm is lost, those that were reached last before the others."""
    place: SavedPeer | None = None
    """How this peer comes back as the same one; as its run folder has it."""

    def __init__(self, held: ExitStack, spec: PeerSpec, hooks: Hooks) -> None:
        self.held, self.spec, self.hooks = held, spec, hooks
        self.progress = Progress()
        self.rounds: RoundRecorder | None = None
        self.wall_clock = address.WallClock()
        # How it gets on, also when it has lost the swarm meanwhile.
        self.step_seconds = 0.0
        """How long an update takes, on average over the last few; 0: not known yet."""
        self.exchange_seconds = 0.0
        """How long the last exchange took."""
        self.rounds_alone = 0
        self.journal: Journal | None = None
        """Of a volunteer, also when it has lost the swarm meanwhile."""

    def open_node(self, own: Pass, admission: Admission, identity: Path | None, peers: Sequence[str] = ()) -> None:
        """Come into the DHT of the swarm at ``peers``; of a new one without any."""
        spec = self.spec
        # The file of a new key is needed while the node starts, and would stay behind a peer that is killed.
        with access.identity(identity, own, admission) as me:
            host, port = spec.host, spec.port
            node = open_dht(me, peers=peers, host=host, port=port, announce=spec.announce, proven=not spec.team)
            self.dht = self.held.enter_context(node)
        self.identity = me

    def build_model(self, splits: Splits) -> None:
        """A model on the CPU, and what the peers have in common of it."""
        config, self.splits, agreed = self.config, splits, self.config.collaborative
        model = build_model(config.model, splits.info, config.seed)
        self.common = OuterState(model, lr=agreed.outer_lr, momentum=agreed.outer_momentum)
        self.facts = facts_of(config, splits, model)

    def clock_from(self, first_round: int) -> RoundClock:
        """The clock of a run that began with that round."""
        agreed = self.config.collaborative
        return RoundClock(agreed.round_seconds, first_round, agreed.rounds)

    def open_training(self, run_id: str) -> None:
        """What trains here, and what agrees with the others.

        In this order: the averager's process is forked, which must be before a GPU is used for the first time.
        """
        config, spec, common, dht, enter = self.config, self.spec, self.common, self.dht, self.held.enter_context
        agreed = config.collaborative
        averager = enter(open_averager(dht, common, config, meeting_place(run_id, self.facts)))
        ranks = spec.env if spec.team else replace(spec.env, rank=0, world_size=1)
        joined = distributed(ranks, use_gpu=wants_gpu(config), secret=spec.secret, collective_timeout=PATIENCE)
        self.team = enter(spread(config, enter(joined), self.splits, common, dht.peer_id))
        link = Link(common.theta.numel(), agreed, spec.max_upload)
        self.averaging = Averaging(averager, dht, common, agreed, link)
        if dht.own.grant.role == "owner" and len(self.splits.val):
            self.averaging.trial = Trial(self.team.judge, common, agreed.round_seconds)
        self.sentry = Sentry(self)
        self.data_seed = data_seed(config, dht.peer_id)

    def open_records(self, role: Role) -> RoundRecorder:
        """Where checkpoints, metrics and bans go; what keeps records of the rounds from now on.

        Loggers say which peers open them: a volunteer's machine writes no accounts of a service.
        """
        config, writer, run, judge = self.config, self.writer, self.writer.run, self.team.judge
        wanted = ("all", role)
        stated = {name: plugins.stated("trainkit.monitor", name) for name in config.monitor.loggers}
        names = tuple(name for name in stated if stated[name].get("PEERS", "all") in wanted)
        quiet = config.model_copy(update={"monitor": config.monitor.model_copy(update={"loggers": names})})
        loggers = open_loggers(quiet, run, total_steps=0, params=judge.num_parameters, may_write=writer.may_write)
        metrics = self.held.enter_context(loggers)
        device, every = judge.dist.device.type, config.monitor.hardware_every_seconds
        self.held.enter_context(sample_hardware(run, socket.gethostname(), every, device))
        keep, asynchronous = config.checkpoint.keep, config.checkpoint.asynchronous
        self.checkpoints = Checkpoints(
            run.checkpoints, keep=keep, dist=judge.dist, may_write=writer.may_write, asynchronous=asynchronous
        )
        self.held.enter_context(closing(self.checkpoints))
        self.held.push(self._settle)
        self.recorder = Recorder(judge, writer, self.checkpoints, metrics, self.progress, self.hooks.beat)
        self.rounds = RoundRecorder(self, role)
        self.dht.excluded.bans.keep_in(run.path)
        return self.rounds

    def _settle(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:  # what was saved last must be on the disk before this peer says that it is done
            self.checkpoints.settle()

    def keep_place(self, run_id: str, addresses: list[str]) -> None:
        """Keep in the run folder how this peer comes back as the same one, and where others join through it."""
        spec, run, port = self.spec, self.writer.run, self.dht.port
        assert spec.host is not None
        keep_identity(run, self.identity.content)
        self.place = SavedPeer(run_id, self.clock.first, spec.host, port, spec.announce, spec.name, self.others)
        self.place.write(run)
        write_addresses(run, addresses)

    def remember(self, reachable: Sequence[str]) -> None:
        """Turn to these first when the swarm is lost. Those of before stay, for they may come back."""
        before, self.others = self.others, known_of([*reachable, *self.others])
        if self.place is not None and set(self.others) != set(before):
            self.place = replace(self.place, others=self.others)
            with suppress(OSError):  # a full disk: what was known before is still there
                self.place.write(self.writer.run)

    def adopt(self, seconds: float, *, newer_than: int = -1, fits: Callable[[], bool] = lambda: True) -> bool:
        """Take over the state of the run; asks again for so long, until told to leave. False if nobody has given one.

        Args:
            newer_than: a state is of no use that is not of a later round.
            fits: whether one that was taken over will do.
        """
        deadline, pause = time.monotonic() + seconds, 0.5
        while (left := deadline - time.monotonic()) > 0.0 and not self.hooks.stop_requested():
            if self.averaging.adopt(min(left, processes.at_load(ASK_SECONDS)), newer_than=newer_than) and fits():
                return True
            # Asked by everybody at once, the few peers that give it away would do nothing else.
            time.sleep(min(pause, left))
            pause = min(2 * pause, 8.0, self.clock.seconds / 4)
        return False

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Write an event."""
        if self.rounds is not None:
            self.rounds.remark(kind, **facts)

    def hear(self) -> None:
        """Take in what the others say.

        Raises UserError when this machine's clock was set, and is not the swarm's any more.
        """
        self.averaging.require_helpers()
        if jumped := self.wall_clock.jumped():
            agrees = address.require_same_time(self.dht, self.others)
            if not agrees and self.may_be_alone:  # the others have gone by this clock as it was
                raise address.wrong_clock(f"was set {'forward' if jumped > 0.0 else 'back'} by {abs(jumped):,.1f} s")
        self.watch.poll()

    @property
    def has_moved(self) -> bool:
        """The run goes on by another clock. Clocks move on only, so that an old manifest moves nobody back."""
        return self.watch.first_round > self.clock.first

    def before_round(self) -> None:
        """Remember the peers that can be reached, and look for those of them that are silent.

        hivemind has forgotten them: the halves of a swarm whose network was cut for a while would stay two for ever.
        """
        self.remember(self.watch.reachable())
        heard = self.watch.others(time.time() - LOST_AFTER * self.clock.seconds)
        if silent := [item for item in self.others if peer_of(item) not in heard]:
            self.dht.look_for(silent)  # this does not wait

    def after_round(self, done: PeerRound) -> None:
        """Take note of a round."""
        if self.rounds is not None:
            self.rounds.after_round(done)

    def credit(self, counted: Collection[Counted]) -> None:
        """Take note of who has contributed to a round."""

    def withdraw(self, name: str) -> None:
        """Take back all that was noted of a name."""

    def shut_out(self, banned: Collection[str]) -> None:
        """Shut the door on exactly these ids, of peers or of invitations."""
        self.dht.admission.ban(banned)
        self.dht.publish_excluded()
