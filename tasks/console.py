"""Log lines of a flow process on its stderr, which is a pipe to a runner that may die."""

from __future__ import annotations

import contextlib
import logging

from prefect.logging.handlers import PrefectConsoleHandler


class LastingConsoleHandler(PrefectConsoleHandler):
    """Prefect's, but a pipe that nobody reads any more does not end the process: from then on nothing is written."""

    def emit(self, record: logging.LogRecord) -> None:
        # What rich raises on a broken pipe, after it has fallen silent. It is raised in whatever thread has logged.
        with contextlib.suppress(SystemExit):
            super().emit(record)
