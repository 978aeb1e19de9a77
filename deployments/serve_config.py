"""The configuration of `shoal serve`: which runs it offers, on which schedule, and what it accepts."""

from __future__ import annotations

import zoneinfo
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import yaml
from pydantic import Field, model_validator

from trainer.config import PoolConfig, RunConfig, Section, describe_problem, load_config
from trainer.errors import ConfigError
from trainer.permits import Permits


class ScheduleConfig(Section):
    """When a run starts by itself: a cron line or an interval, never both."""

    cron: str | None = None
    """For example `0 2 * * *`: every night at two."""
    interval_seconds: float | None = Field(default=None, ge=10)
    """Seconds between two starts."""
    timezone: str
    """In which the schedule is meant, for example `Europe/Berlin` or `UTC`. Always explicit: servers differ."""
    if_running: Literal["skip", "queue"] = "skip"
    """What becomes of a start while an earlier one of this schedule still runs. It is never doubled."""
    own_run_each_time: bool = False
    """True: each start trains a run of its own, named `<run_name>-<time of the schedule in UTC>`. False: each start
    continues the same run, which does nothing once that is complete."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.cron is None) == (self.interval_seconds is None):
            raise ValueError("schedule: exactly one of cron and interval_seconds is needed")
        if self.timezone not in zoneinfo.available_timezones():
            raise ValueError(f"schedule.timezone: {self.timezone!r} is no time zone; for example Europe/Berlin or UTC")
        if self.cron is not None:
            from prefect.client.schemas.schedules import CronSchedule  # takes a second, and few need it

            try:
                CronSchedule(cron=self.cron, timezone=self.timezone)
            except pydantic.ValidationError as error:
                raise ValueError(f"schedule.cron: {self.cron!r} is no cron line; for example '0 2 * * *'") from error
        return self


class ServedRun(Section):
    """One deployment of the `train` flow with fixed parameters."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Of the deployment: `train/<name>` in the UI."""
    config: Path
    """Its run configuration, relative to this file."""
    set: tuple[str, ...] = ()
    """Overrides, as `shoal train --set`."""
    schedule: ScheduleConfig | None = None
    """None: it starts when somebody starts it."""


class AlertsConfig(Section):
    """When somebody should look at a run. Each alert is an automation; None switches one off."""

    incidents_per_hour: int | None = Field(default=6, ge=1)
    """This many incidents of one run within an hour."""
    goodput_below: float | None = Field(default=0.5, gt=0, le=1)
    """Goodput of one run since its flow run began to train, looked at from ten minutes on. At most once an hour."""
    no_progress_seconds: float | None = Field(default=3600, ge=10)
    """A run that does not wait for capacity committed nothing for this long."""
    waiting_seconds: float | None = Field(default=1800, ge=10)
    """A run waited for capacity this long."""
    failed_actions: bool = True
    """An automation of this server, of whatever kind, could not act. At most once an hour for each."""
    notification_block: str | None = Field(default=None, pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")
    """Prefect block that sends them, as `type/name`, for example `slack-webhook/training`. None: they are shown in the
    UI's event feed only."""


class ServeConfig(Section):
    """Everything that `shoal serve` needs to know."""

    allow: Permits
    """What anyone who reaches the server may ask for."""
    runs: tuple[ServedRun, ...] = ()
    """Deployments beside `train/train`, whose form asks for everything."""
    pool: PoolConfig | None = None
    """Hosts for all runs of this service, which outlive them. None: each run brings hosts of its own."""
    look_at_pool_seconds: float = Field(default=300.0, ge=10)
    """The flow scale-up looks at the pool this often, besides each time its capacity changes."""
    host: str = "127.0.0.1"
    """Address that the Prefect server listens on. It has no passwords of its own: think before opening it."""
    port: int = Field(default=4200, ge=1, le=65535)
    """Of the Prefect server: its UI and its API."""
    database_url: str | None = None
    """Of the Prefect server, for example `postgresql+asyncpg://user:password@host/prefect`. None: what the
    environment says in PREFECT_SERVER_DATABASE_CONNECTION_URL, or else SQLite in PREFECT_HOME."""
    max_flow_runs: int = Field(default=8, ge=1)
    """Flow runs at the same time, of all deployments together."""
    poll_seconds: float = Field(default=2.0, ge=1)
    """Between two looks for flow runs that are due."""
    heartbeat_seconds: int = Field(default=30, ge=30)
    """Between two signs of life of a flow process; Prefect allows no less than 30."""
    lost_after_seconds: int = Field(default=120, ge=100)
    """A flow run that gave no sign of life for this long is taken for dead."""
    continue_crashed: bool = True
    """Whether a flow run whose process died is continued without a person. False: it stays Crashed until somebody
    presses Retry."""
    alerts: AlertsConfig = AlertsConfig()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        names = [run.name for run in self.runs]
        if "train" in names:
            raise ValueError("runs: train is the name of the deployment that asks for everything; choose another")
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"runs: {', '.join(doubled)} is there twice; each name makes one deployment")
        if self.lost_after_seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"lost_after_seconds ({self.lost_after_seconds}) must be at least three times heartbeat_seconds "
                f"({self.heartbeat_seconds}): one late sign of life is no death"
            )
        return self


def load_serve_config(path: Path) -> ServeConfig:
    """Read a YAML file.

    Raises:
        ConfigError: unreadable or malformed file, unknown key or bad value.
    """
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    try:
        return ServeConfig.model_validate(values if values is not None else {})
    except pydantic.ValidationError as error:
        raise ConfigError(
            "\n".join(f"{path}: {describe_problem(ServeConfig, problem)}" for problem in error.errors())
        ) from error


def load_served_runs(path: Path, config: ServeConfig) -> Sequence[tuple[ServedRun, RunConfig]]:
    """The run configurations that a service names, checked against what it accepts.

    A relative `storage` or `data.path` in one of them is meant relative to where the service was started.

    Raises:
        ConfigError: one of them is bad.
        RefusedError: one of them asks for something that the service does not accept.
    """
    found = []
    for served in config.runs:
        run_config = load_config(path.parent / served.config, served.set)
        config.allow.check(run_config)
        found.append((served, run_config))
    return found
