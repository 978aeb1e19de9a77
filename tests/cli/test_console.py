"""A flow process logs to a pipe; the runner at its other end may be gone."""

from __future__ import annotations

import os
import subprocess
import sys

from deployments.serve import FLOW_SETTINGS

LOGS_TWICE = """
from prefect.logging import get_logger
from prefect.logging.configuration import ensure_logging_setup
ensure_logging_setup()
get_logger("shoal").error("first")
get_logger("shoal").error("second")
print("still there")
"""


def test_a_log_line_that_nobody_can_read_does_not_end_the_process() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    finished = subprocess.run(
        [sys.executable, "-c", LOGS_TWICE],
        env={**os.environ, **FLOW_SETTINGS},
        stdout=subprocess.PIPE,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    # On a broken pipe rich takes stdout, too, for lost.
    assert finished.returncode == 0, finished.stdout
