"""A rank that is a script of the user's own: it is started, told to stop, waited for, and its end is recorded.

This process stays small: the script is a child of it, whose output goes straight to the rank's log, so that nothing of
ours stands in a traceback. The child has torchrun's variables, and runs from the snapshot in the folder of submission.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import KeeperLink, StopFlag, ending_in_words, hand_back
from trainkit.common import fileio, terminal
from trainkit.common.accelerators import DEVICE
from trainkit.common.errors import UserError
from trainkit.common.hosts import free_port
from trainkit.common.process import end_with_parent
from trainkit.config.schema import Config, LaunchConfig, ScriptConfig
from trainkit.diagnosis.rank_log import RankLog
from trainkit.monitor.hardware import SAMPLED, sample_host
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import PRUNED, RunDir
from trainkit.run.history import history_of
from trainkit.run.metrics import describe_names
from trainkit.run.pruning import eta_of
from trainkit.script.command import child_environment, command_of, is_shell
from trainkit.script.event_files import EventFiles
from trainkit.script.idle import Idle
from trainkit.training.idle_guard import IdleGuard

LOOK_SECONDS = 0.25
"""Between two looks at the script and at requests to stop."""


def run_script(
    config: Config, env: Mapping[str, str], stop: StopFlag, node: Attempt | None, beat: Callable[[], None],
    open_run: Callable[[], Attempt],
) -> tuple[str, RunDir | None]:  # fmt: skip
    """Run the script of ``config`` as the rank that ``env`` says. Returns the outcome and, on rank 0, the run.

    Args:
        node: the attempt as this node's supervisor has begun it, if any.
        open_run: called on rank 0 alone.

    Raises:
        SystemExit: the script has failed; its exit code, 128 and the number of the signal that has killed it.
        UserError: it cannot be started.
    """
    script = config.script
    assert script is not None
    rank_env = RankEnv.from_mapping(env)
    if not rank_env.master_port:  # a single rank meets nobody, but its script may want to
        rank_env = replace(rank_env, master_port=free_port())
    writer = open_run() if rank_env.is_main else None
    attempt = writer or node
    command = command_of(config, rank_env, attempt, Path.cwd(), env)
    link = KeeperLink.named_in(env)
    child = _start(command, {**child_environment(config, rank_env, attempt, env), SAMPLED: "1"}, script, link)
    if writer is not None:
        hosts = list(rank_env.hosts) or [rank_env.master_addr]
        describe_names(writer.run, (), (config.checkpoint.best or "").removeprefix("val/"))
        writer.started(script=True, step=0, world_size=rank_env.world_size, hosts=hosts)
    idle = Idle.of(config.launch, attempt, rank_env, child.pid)
    watch = _Watch(child, config.launch, stop, rank_env, idle, _pruned_file(attempt))
    event_files = EventFiles(writer) if writer is not None else None

    def look() -> None:
        beat()
        if event_files is not None:
            event_files.look()

    with _sampled(config, rank_env, attempt, stop, env):
        code = watch.wait(look)
    if event_files is not None:
        event_files.look(now=True)
    outcome = _outcome(code, watch, config.launch)
    if writer is not None and node is None:  # nobody looks after this rank
        writer.ended({"completed": "COMPLETED", "preempted": "PREEMPTED"}.get(outcome, "FAILED"))
    if outcome == "preempted" and not _has_said(attempt, "handed_back", rank_env.node_rank):
        hand_back(attempt, rank_env, stop.signals, step=None, was_ended=not _has_saved(code, watch, config.launch))
    if watch.is_pruned and writer is not None:
        told = {"outcome": "pruned", "stopped_early": PRUNED.read(writer.logs)}
        fileio.write(writer.run.summary, json.dumps(told), writer.run.path)
    if outcome == "failed" and not (link is not None and link.saves):  # which it was ordered to, and to end
        _record_failure(attempt, rank_env, code, watch)
    if outcome == "failed":
        raise SystemExit(code if code > 0 else 128 - code)
    return outcome, writer.run if writer is not None else None


@contextmanager
def _sampled(
    config: Config, rank_env: RankEnv, attempt: Attempt | None, stop: StopFlag, env: Mapping[str, str]
) -> Iterator[None]:  # fmt: skip
    """Sample the hardware of this host while the body runs, and watch over its GPUs."""
    if attempt is None:
        yield
        return
    guard = IdleGuard(config.launch.idle_minutes, attempt, socket.gethostname(), stop, lambda: "ran its script")
    guard.has_started = True  # nobody knows when a script has
    device = "cpu" if env.get(DEVICE) == "cpu" else "gpu"
    every_seconds = config.monitor.hardware_every_seconds
    with sample_host(attempt.run, every_seconds, device, rank_env, guard.look):
        yield


def _start(
    command: list[str], env: Mapping[str, str], script: ScriptConfig, link: KeeperLink | None
) -> subprocess.Popen[bytes]:
    """Start the script; one that has a `trainkit.rank` listens to this rank's keeper itself."""
    known = {} if link is None else link.variable()
    descriptors = () if link is None else link.descriptors

    def before_exec() -> None:
        # This process's own are inherited otherwise. Whoever knows USR2 handles it; nobody else shall die by it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if is_shell(script) else signal.SIG_IGN)
        end_with_parent()

    try:
        return subprocess.Popen(command, env={**env, **known}, preexec_fn=before_exec, pass_fds=descriptors)
    except OSError as error:
        fix = "Check its name, its rights, and the PATH of the job."
        raise UserError(f"{command[0]} cannot be started.", why=f"{error.strerror}.", fix=fix) from None


class _Watch:
    """Watch over a script between its start and its end."""

    def __init__(
        self, child: subprocess.Popen[bytes], launch: LaunchConfig, stop: StopFlag, env: RankEnv, idle: Idle | None,
        pruned: Path | None,
    ) -> None:  # fmt: skip
        self._child = child
        self._signal = signal.Signals[f"SIG{launch.stop_signal}"]
        self._stop = stop
        self._env = env
        self._idle = idle
        self._pruned = pruned
        self._passed = 0
        self._patience = max(launch.lead_seconds() * 5 / 6, 1.0)
        self._told_at: float | None = None
        self._goes_on = goes_on(launch)
        self._is_late = False
        self.heard = False
        """The script handles the signal that tells it to stop."""
        self.hanging = ""
        """Words of a hang for which it was ended."""
        self.is_pruned = False
        """Its sweep does without it, and it was ended for that."""

    @property
    def was_told(self) -> bool:
        """True once somebody has asked the script to stop."""
        return self._told_at is not None

    def wait(self, look: Callable[[], None]) -> int:
        """Wait for the end, and pass on what comes meanwhile. Returns the exit code, negative for a signal."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = self._child.wait(LOOK_SECONDS)
                if self._passed < len(self._stop.signals):  # it was told as well, and was quicker
                    self._told_at = time.monotonic()
                    self.heard = True
                return code
            look()
            if self._told_at is not None and not self.heard:  # it may be loading its libraries
                self._tell()
            while self._passed < len(self._stop.signals):
                self._pass_on(self._stop.signals[self._passed])
                self._passed += 1
            self._end_if_due()

    def _pass_on(self, name: str) -> None:
        """Pass on a request to stop; of those who do not handle it the machine's own ends the script.

        Who has handled one is told no second time: it may have queued its job again, for which SLURM now ends it.
        """
        if self._told_at is None:
            self._told_at = time.monotonic()
        if self.heard:
            return
        sends = not (self._env.is_signalled_itself and name == self._signal.name)
        if not self._tell(sends=sends) and name == "SIGTERM":
            self._child.terminate()

    def _tell(self, *, sends: bool = True) -> bool:
        """Signal the processes that handle it, the script itself first. Returns False if there are none."""
        listeners = _listeners(self._child.pid, self._signal)
        self.heard |= bool(listeners)
        for pid in listeners if sends else ():
            with suppress(OSError):  # it has just ended
                os.kill(pid, self._signal)
        return bool(listeners)

    def _end_if_due(self) -> None:
        """End a script that was told to stop and has not, that its sweep does without, or that hangs."""
        pid = self._child.pid
        if self._told_at is not None and time.monotonic() - self._told_at > self._patience and not self._is_late:
            self._is_late = True
            does = "has not ended" if self.heard else f"does not handle {self._signal.name} (launch.stop_signal)"
            terminal.warn(f"The script was told to stop, and {does}{': it is ended' if self._goes_on else ''}.")
            if self._goes_on:
                end_family(pid)
        if self._pruned is not None and self._pruned.exists():
            self.is_pruned = True
            end_family(pid)
        if self._idle is not None and self._told_at is None:
            self.hanging = self._idle.look()
            if self.hanging:
                end_family(pid)
                self._idle = None


def goes_on(launch: LaunchConfig) -> bool:
    """True if a script that was ended is worth another start, though it has not said that it has saved."""
    return launch.requeue == "always" or (bool(launch.requeue) and launch.on_restart is not None)


def _outcome(code: int, watch: _Watch, launch: LaunchConfig) -> str:
    if _has_saved(code, watch, launch):
        return "preempted"
    if code == 0 or watch.is_pruned:
        return "completed"
    if watch.was_told and goes_on(launch) and not watch.hanging:
        return "preempted"
    return "failed"


def _has_saved(code: int, watch: _Watch, launch: LaunchConfig) -> bool:
    """True if a script says by its exit code that it has saved what it was told to."""
    saved = 0 if launch.stop_exit_code is None else launch.stop_exit_code
    return watch.was_told and code == saved and bool(watch.heard or code)


def _pruned_file(attempt: Attempt | None) -> Path | None:
    """The file by which the ranks of an attempt are told that their sweep does without them; None outside of such."""
    if attempt is None or not eta_of(attempt.run.path.parent):
        return None
    return PRUNED.at(attempt.logs)


def _has_said(attempt: Attempt | None, kind: str, node_rank: int) -> bool:
    """True if the script has written an event of this attempt itself."""
    if attempt is None:
        return False
    for event in read_events(attempt.run, kind):
        if event.get("attempt") == attempt.number and event.get("node_rank", node_rank) == node_rank:
            return True
    return False


def _record_failure(attempt: Attempt | None, env: RankEnv, code: int, watch: _Watch) -> None:
    """Record why a rank failed: where nobody had told it to stop, srun now tells the others, who hand the run back."""
    if attempt is None or (watch.was_told and code > 0):
        return
    if any(item.attempt == attempt.number and item.rank == env.rank for item in history_of(attempt.run).failures):
        return
    words = ending_in_words(code)
    own_words = RankLog(attempt.logs / f"rank-{env.rank}.err").error if code > 0 else ""
    if fileio.full(attempt.run.path):  # its log has no room for its own words either
        words += f"; No space left on device: {attempt.run.path}"
    attempt.failed(watch.hanging or own_words or words, rank=env.rank)


# Processes


def family(pid: int) -> list[int]:
    """List a process and all that it has started, itself first."""
    import psutil  # most ranks end before it is needed

    with suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def end_family(pid: int) -> None:
    """Kill a process and all that it has started."""
    for one in reversed(family(pid)):
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)


def _listeners(pid: int, number: int) -> list[int]:
    """List processes of a family that handle a signal: a process itself, or else those that it has started."""
    import psutil

    if _handles(pid, number):
        return [pid]
    found = list[int]()
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            found += _listeners(child.pid, number)
    return found


def _handles(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal, or has just ended by it; without /proc nobody can tell."""
    try:
        text = fileio.read_text(Path(f"/proc/{pid}/status"))
    except OSError:
        return True
    caught = text.partition("SigCgt:")[2].split()[0]
    return "\nState:\tZ" in text or bool(int(caught, 16) >> (number - 1) & 1)
