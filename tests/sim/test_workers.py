"""The processes of a campaign end with it, however it ends."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

PATIENCE_S = 60.0


def still_run(processes):
    """Which of them do when the patience is over; one that nobody has reaped does not."""
    give_up_s = time.monotonic() + PATIENCE_S
    left = processes
    while left and time.monotonic() < give_up_s:
        left = [process for process in psutil.wait_procs(left, timeout=1)[1] if process.status() != "zombie"]
    return left


@pytest.mark.processes
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_of_a_campaign_that_is_killed_do_not_go_on(end):
    command = [sys.executable, "-m", "kvpush.testing", "sim", "--seeds", "1000000", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as campaign:
        assert campaign.stderr is not None
        campaign.stderr.readline()  # the first batch is done
        workers = psutil.Process(campaign.pid).children()
        assert len(workers) >= 2
        campaign.send_signal(end)
        campaign.wait(PATIENCE_S)
        assert not still_run(workers)
