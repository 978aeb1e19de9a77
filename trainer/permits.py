"""What a served deployment may be asked to do.

Whoever can reach a Prefect server can start its deployments with any parameters, and a job is code that runs. So a
service lists what it accepts, and everything else is refused before any work. `shoal train` in a shell, whose user
could run anything anyway, is not limited.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from trainer.config import RunConfig, Section
from trainer.errors import RefusedError

PERMITS_VARIABLE = "SHOAL_PERMITS"
"""Holds the permits of the service as JSON in the environment of the flow processes that it starts."""


class Permits(Section):
    """What runs of served deployments may use."""

    jobs: tuple[str, ...] = ("lm",)
    """Jobs that may be trained: `lm`, `package.module:Class`."""
    storage_roots: tuple[Path, ...]
    """Directories in which runs may be kept, themselves or below."""
    data_roots: tuple[Path, ...] = ()
    """Directories from which `data.path` and `capacity.trace_path` may read. The default data needs none."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Programs that `capacity.command` may be, each a list with all its arguments: exactly these are accepted."""
    metrics_hosts: tuple[str, ...] = ("127.0.0.1",)
    """Addresses on which `metrics.port` may be opened."""

    def check(self, config: RunConfig) -> None:
        """Raises RefusedError, naming what was asked for and what is listed."""
        if config.job not in self.jobs:
            raise RefusedError(f"job {config.job!r} is not served here; listed (allow.jobs): {', '.join(self.jobs)}")
        self.check_storage(config.storage)
        # Whether it would be used or not: what a setting names, its next start may use.
        for key, path in (("data.path", config.data.path), ("capacity.trace_path", config.capacity.trace_path)):
            if path is not None and not _inside(path, self.data_roots):
                listed = ", ".join(map(str, self.data_roots)) or "none, only the default data"
                raise RefusedError(f"{key} {path!r} is not served here; listed (allow.data_roots): {listed}")
        if config.capacity.command and config.capacity.command not in self.commands:
            raise RefusedError(
                f"capacity.command {list(config.capacity.command)} is not served here; "
                f"listed (allow.commands): {', '.join(str(list(command)) for command in self.commands) or 'none'}"
            )
        if config.metrics.port is not None and config.metrics.host not in self.metrics_hosts:
            raise RefusedError(
                f"metrics.host {config.metrics.host!r} is not served here; "
                f"listed (allow.metrics_hosts): {', '.join(self.metrics_hosts) or 'none'}"
            )

    def check_storage(self, storage: str) -> None:
        """Raises RefusedError, naming what was asked for and what is listed."""
        if not _inside(storage, self.storage_roots):
            raise RefusedError(
                f"storage {storage!r} is not served here; "
                f"listed (allow.storage_roots): {', '.join(map(str, self.storage_roots))}"
            )


def permits_of(environment: Mapping[str, str] = os.environ) -> Permits | None:
    """Of the service that started this process, or None outside of one."""
    text = environment.get(PERMITS_VARIABLE)
    return Permits.model_validate_json(text) if text is not None else None


def _inside(path: str, roots: tuple[Path, ...]) -> bool:
    # Resolved, so that neither `..` nor a symbolic link leads out.
    resolved = Path(path).expanduser().resolve()
    return any(resolved.is_relative_to(root.expanduser().resolve()) for root in roots)
