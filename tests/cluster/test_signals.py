import os
import signal

import pytest

from tests.shell import python
from trainkit.cluster.signals import stop_on_signal


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_sets_the_flag_and_nothing_else(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signal(leaves_process=False) as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signals == [number.name]
    assert signal.getsignal(number) == before


def test_a_process_on_its_way_out_is_not_killed_by_the_second_signal() -> None:
    """And the handlers come before torch is imported."""
    code = (
        "import os, signal, sys, trainkit.cluster.signals as signals, jobs.train\n"
        "with signals.stop_on_signal(): pass\n"
        "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR2)\n"
        "print('still here', 'torch' in sys.modules)"
    )
    assert python("-c", code).stdout.strip() == "still here False"


def test_a_signal_that_came_while_blocked_is_not_lost() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.raise_signal(signal.SIGUSR2)  # to this thread: another might not block it
    with stop_on_signal(leaves_process=False) as stop:
        assert stop.requested
