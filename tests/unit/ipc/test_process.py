from __future__ import annotations

import os
import subprocess
import sys

from harness.ipc.process import open_pidfd, pidfd_dead
from tests.support.patience import HANG_S


def test_a_pidfd_tells_a_live_process_from_a_dead_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = open_pidfd(process.pid)
    assert pidfd is not None
    assert not pidfd_dead(pidfd)

    process.kill()
    process.wait(HANG_S)
    process.communicate()

    assert pidfd_dead(pidfd)
    assert open_pidfd(process.pid) is None
    os.close(pidfd)
