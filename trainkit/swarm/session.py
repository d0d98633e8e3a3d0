"""What every peer of a swarm is made of: built step by step, and taken down in reverse."""

from __future__ import annotations

import ast
import hashlib
import json
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from trainkit import fileio, plugins
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.schema import Config
from trainkit.data.base import Samples, Splits
from trainkit.distributed.process_group import distributed
from trainkit.errors import RefusedError
from trainkit.models import build_model
from trainkit.monitor import open_loggers
from trainkit.monitor.hardware import sample_hardware
from trainkit.plugins import find_module
from trainkit.run.events import Remark, Writer
from trainkit.swarm import access
from trainkit.swarm.access import Identity
from trainkit.swarm.address import Memory, SavedPeer, keep_identity
from trainkit.swarm.admission import Admission
from trainkit.swarm.average import Averaging, open_averager
from trainkit.swarm.bans import Sentry, banned_with
from trainkit.swarm.dht import SwarmDHT, Watch, open_dht
from trainkit.swarm.invitations import Pass
from trainkit.swarm.link import Link, patience
from trainkit.swarm.messages import RoundClock, UpdateClock
from trainkit.swarm.records import PeerRound, Role, RoundRecorder
from trainkit.swarm.spec import Hooks, PeerSpec
from trainkit.swarm.sync_diloco import CommonState, OuterState
from trainkit.swarm.sync_gradients import GatheringParts, GradientState
from trainkit.swarm.team import PATIENCE, Team, data_seed, spread
from trainkit.training.build import wants_gpu
from trainkit.training.recorder import Progress, Recorder

# What every peer of a run must have alike, beyond the settings: without it their averages mean nothing.
#
# The creator publishes it with the run, and a peer that joins compares it with its own before it averages with
# anybody. Peers that differ do not even look for each other in the same place (see `meeting_place`).

_PACKAGE = Path(__file__).resolve().parents[1]
# Samples, evenly spaced, that tell one data set from another.
_SAMPLES = 16
# The third digit of their versions mends errors, and does not change what is computed.
_LIBRARIES = ("torch", "hivemind")
_MODEL_LIBRARIES = ("timm", "torchvision")
_DATA = "data"
_CODE = "code of "
# The code that makes updates, and the code that averages them.
_ROOMS = ("data", "models", "tasks", "training")
_ROUNDS = ("exchange", "link", "messages", "sync_diloco", "sync_gradients")
# Of a module's syntax tree.
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MEANS_NOTHING = ("type_comment", "kind", "ctx")
_MENDS = {
    _DATA: "Give data.root the folder of the very same data set.",
    "settings": "Take the run's settings as they are.",
}


def facts_of(config: Config, splits: Splits, model: nn.Module) -> dict[str, str]:
    """One line for each, as the user sees it."""
    found = {
        "model": _model(model),
        _DATA: _data(splits),
        "seed": str(config.seed),
        **code_facts(_PACKAGE, [getattr(config, section).name for section in ("model", "data", "task")]),
    }
    libraries = {type(part).__module__.partition(".")[0] for part in model.modules()}
    found |= installed()
    for name in _MODEL_LIBRARIES:
        if name in libraries:
            found[name] = metadata.version(name).split("+")[0]
    return found


def without_data(ours: Mapping[str, str], theirs: Mapping[str, str], config: Config) -> dict[str, str]:
    """``ours`` of a peer that does not train: what only says which data set it is, is the run's."""
    module = config.data.name.partition(":")[0]
    about = {_DATA, *([_CODE + module] if module != config.model.name.partition(":")[0] else [])}
    taken = {key: theirs[key] for key in about if key in theirs}
    return {**{key: value for key, value in ours.items() if key not in about}, **taken}


def installed() -> dict[str, str]:
    """Versions of the libraries that every run needs, by which what is computed may change."""
    return {name: ".".join(metadata.version(name).split("+")[0].split(".")[:2]) for name in _LIBRARIES}


def in_words(versions: Mapping[str, str]) -> str:
    """``hivemind 1.1, torch 2.6``"""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def parameters_in(facts: Mapping[str, str]) -> int:
    """How many the run's model has; 0 if that is not said."""
    number = facts.get("model", "").partition(" ")[0].replace(",", "")
    return int(number) if number.isdecimal() else 0


def require_same(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Refuse to take part with something else than the run has.

    Raises RefusedError that names everything in which they differ.
    """
    different = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if not different:
        return
    libraries = [key for key in different if key in theirs and key in (*_LIBRARIES, *_MODEL_LIBRARIES)]
    mends = [_MENDS[key] for key in different if key in _MENDS]
    if any(key.startswith(_CODE) for key in different):
        mends.append("Use the creator's version of trainkit, and of code of one's own.")
    if libraries:
        mends.append(f"Install {', '.join(f'{key} {theirs[key]}' for key in libraries)}.")
    raise RefusedError(
        f"This peer differs from the run in: {', '.join(different)}.",
        why="; ".join(f"{key}: {ours.get(key, 'none')} here, {theirs.get(key, 'none')} in the run" for key in different)
        + ".",
        fix=" ".join(mends) or "Use what the creator of the run uses.",
    )


def meeting_place(run_id: str, facts: Mapping[str, str]) -> str:
    """Where peers of a run look for each other: those that differ in what matters never meet."""
    return f"{run_id}-{_hash([json.dumps(dict(facts), sort_keys=True).encode()])}"


def _model(model: nn.Module) -> str:
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{size:,} parameters in {len(shapes)} tensors ({_hash([repr(shapes).encode()])})"


def _data(splits: Splits) -> str:
    info = splits.info
    about = [repr((info.class_names, info.num_classes, info.in_chans, info.image_size)).encode()]
    for samples in (splits.train, splits.val, splits.test):
        about.append(str(len(samples)).encode())
        about.extend(_some(samples))
    return f"{info.name}, {len(splits.train):,} samples to train on, {info.num_classes} classes ({_hash(about)})"


def _some(samples: Samples) -> Iterable[bytes]:
    size = len(samples)
    for index in sorted({place * size // _SAMPLES for place in range(_SAMPLES)} if size else ()):
        try:
            image, label = samples[index]
        except (OSError, ValueError):  # an image that cannot be decoded is so everywhere
            yield b"broken"
            continue
        yield str(int(label)).encode()
        # Decoders of JPEG differ in the last bit; bytes count only where nothing was decoded.
        yield image.numpy().tobytes() if hasattr(image, "numpy") else repr(image.size).encode()


def code_facts(package: Path, plugins: Iterable[str]) -> dict[str, str]:
    """Hashes of the code that decides what is computed: in the kit, and in a user's modules that the run names.

    The rest of the kit may differ: what peers say to one another has a version of its own, `messages.PROTOCOL`.
    """
    found = {_CODE + room: sorted((package / room).rglob("*.py")) for room in _ROOMS}
    found[f"{_CODE}swarm"] = [package / "swarm" / f"{name}.py" for name in _ROUNDS]
    for module in sorted(name.partition(":")[0] for name in plugins if ":" in name):
        if (file := find_module(module)) is not None:
            found[_CODE + module] = [file]
    return {
        key: _hash([meaning_of(fileio.read_bytes(file, follow=True)) for file in files]) for key, files in found.items()
    }


def meaning_of(source: bytes) -> bytes:
    """What a module does: without comments, docstrings and layout, and alike for every version of Python."""
    words: list[str] = []
    _add_words(ast.parse(source), words)
    return "\0".join(words).encode()


def _add_words(node: object, words: list[str]) -> None:
    if isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            # Later versions of Python have more fields; of older code these are empty.
            if value is None or value == [] or name in _MEANS_NOTHING:
                continue
            if isinstance(node, ast.JoinedStr):  # of Python 3.12 some end with an empty text
                value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
            if name == "body" and isinstance(node, _HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
                value = value[1:]
            words.append(name)
            _add_words(value, words)
        words.append(")")
    elif isinstance(node, list):
        for item in node:
            _add_words(item, words)
        words.append("]")
    else:
        words.append(repr(node))


def _hash(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()[:12]


# Rounds without an average and without news of anybody after which the swarm is lost.
LOST_AFTER = 3


@dataclass
class Pace:
    """How a peer gets on; it outlives a loss of the swarm."""

    step_seconds: float = 0.0
    """How long an update takes, on average over the last few; 0: not known yet."""
    exchange_seconds: float = 0.0
    """How long the last exchange took."""
    rounds_alone: int = 0
    round_seconds: float = 0.0
    """How long the last round was, where it is not the clock that says so."""


class Session:
    """One peer's part in one run: all that the training loop works on.

    Each step needs those before it; what a step opens, ``held`` closes.
    """

    may_be_alone = False
    """A peer that others can reach waits for them where it is; to anybody else silence means that the swarm is gone."""

    config: Config
    identity: Identity
    dht: SwarmDHT
    splits: Splits
    common: CommonState
    facts: dict[str, str]
    clock: RoundClock
    watch: Watch
    memory: Memory
    team: Team
    averaging: Averaging
    sentry: Sentry
    data_seed: int
    """Every peer has a data order of its own, so that together they see more than each alone."""
    writer: Writer
    checkpoints: Checkpoints
    recorder: Recorder

    def __init__(self, held: ExitStack, spec: PeerSpec, hooks: Hooks) -> None:
        self.held, self.spec, self.hooks = held, spec, hooks
        self.progress, self.pace = Progress(), Pace()
        self.rounds: RoundRecorder | None = None

    def open_node(self, own: Pass, admission: Admission, identity: Path | None, peers: Sequence[str] = ()) -> None:
        """Come into the DHT of the swarm at ``peers``; of a new one without any."""
        spec = self.spec
        self.identity = self.held.enter_context(access.identity(identity, own, admission))
        node = open_dht(
            self.identity,
            peers=peers,
            host=spec.host,
            port=spec.port,
            announce=spec.announce,
            proven=not spec.must_prove,
        )
        self.dht = self.held.enter_context(node)

    def build_model(self, splits: Splits) -> None:
        """A model on the CPU, and what the peers have in common of it."""
        config, self.splits = self.config, splits
        model = build_model(config.model, splits.info, config.seed)
        if config.collaborative.sync == "gradients":
            self.common = GradientState(model, config)
        else:
            outer = config.collaborative
            self.common = OuterState(model, lr=outer.outer_lr, momentum=outer.outer_momentum)
        self.facts = facts_of(config, splits, model)

    def clock_from(self, first_round: int) -> RoundClock:
        """The clock of a run that began with that round."""
        agreed = self.config.collaborative
        if agreed.sync == "gradients":
            return UpdateClock(agreed.round_seconds, first_round, agreed.rounds, lambda: self.common.round)
        return RoundClock(agreed.round_seconds, first_round, agreed.rounds)

    def open_training(self, run_id: str, measured: float | None = None) -> None:
        """What trains here, and what agrees with the others.

        In this order: the averager's process is forked, which must be before CUDA is used for the first time.

        Args:
            measured: bytes per second that this peer can send, where that is too slow for all that there is to send.
        """
        config, spec, common, dht, enter = self.config, self.spec, self.common, self.dht, self.held.enter_context
        agreed = config.collaborative
        averager = enter(open_averager(dht, common, agreed, meeting_place(run_id, self.facts)))
        ranks = spec.env if spec.team else replace(spec.env, rank=0, world_size=1)
        joined = distributed(ranks, use_gpu=wants_gpu(config), secret=spec.secret, collective_timeout=PATIENCE)
        self.team = enter(spread(config, enter(joined), self.splits, common, dht.peer_id))
        if isinstance(common, GradientState):
            self.team = replace(self.team, parts=GatheringParts.of(self.team.parts, common.gathered))
        link = Link(
            common.theta.numel(), agreed.compression, agreed.round_seconds, patience(agreed), spec.max_upload, measured
        )
        self.averaging = Averaging(averager, dht, common, agreed, link)
        self.sentry = Sentry(
            self.averaging.averager,
            dht.excluded.bans,
            say=self.hooks.say,
            enforce=self._shut_out,
            invitation_of=lambda peer: banned_with(dht.member(peer), peer, dht.peer_id),
            judges_reducers=dht.own.grant.role == "owner",
        )
        self.data_seed = data_seed(config, dht.peer_id)

    def open_records(self, *, judges: bool) -> None:
        """Where checkpoints and metrics go.

        Loggers say which peers open them: a volunteer's machine writes no accounts of a service.
        """
        config, writer, parts = self.config, self.writer, self.team.judge
        wanted = ("all", "judge") if judges else ("all",)
        stated = {name: plugins.stated("trainkit.monitor", name) for name in config.monitor.loggers}
        names = tuple(name for name in stated if stated[name].get("PEERS", "all") in wanted)
        quiet = config.model_copy(update={"monitor": config.monitor.model_copy(update={"loggers": names})})
        run, dist, every = writer.run, parts.dist, config.monitor.hardware_every_seconds
        metrics = self.held.enter_context(
            open_loggers(quiet, run, total_steps=0, params=parts.num_parameters, may_write=writer.check)
        )
        self.held.enter_context(sample_hardware(run, socket.gethostname(), every, dist.device.type))
        self.checkpoints = Checkpoints(
            run.checkpoints,
            keep=config.checkpoint.keep,
            dist=dist,
            may_write=writer.check,
            asynchronous=config.checkpoint.asynchronous,
        )
        self.held.enter_context(closing(self.checkpoints))
        self.held.push(self._settle)
        self.recorder = Recorder(parts, writer, self.checkpoints, metrics, self.progress, self.hooks.beat)

    def _settle(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:  # what was saved last must be on the disk before this peer says that it is done
            self.checkpoints.settle()

    def keep_place(self, run_id: str, addresses: list[str], *, is_anchor: bool = False) -> None:
        """Keep in the run folder how this peer comes back as the same one; then others may join through it."""
        spec = self.spec
        assert spec.host is not None
        keep_identity(self.writer.run, self.identity.path)
        place = SavedPeer(run_id, self.clock.first, spec.host, self.dht.port, spec.announce, spec.name, is_anchor)
        self.memory.keep_in(self.writer.run, place)
        self.hooks.opened(self.writer.run, addresses)

    def record(self, role: Role) -> RoundRecorder:
        """From now on keep records of the rounds, and of bans."""
        self.rounds = RoundRecorder(self, role)
        self.sentry = self.sentry.keeping(self.writer.run, self.rounds.remark)
        return self.rounds

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Write an event."""
        if self.rounds is not None:
            self.rounds.remark(kind, **facts)

    def before_round(self) -> None:
        """Remember the peers that can be reached."""
        self.memory.note(self.watch.reachable())

    def after_round(self, done: PeerRound) -> None:
        """Take note of a round."""
        if self.rounds is not None:
            self.rounds.after_round(done)

    def _shut_out(self, banned: Collection[str]) -> None:
        self.dht.admission.ban(banned)
        self.dht.publish_excluded()
