"""A run's figures for Prometheus, on a port of the flow's process while the run lives."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from trainer.config import RunConfig
from trainer.control.journal import listening
from trainer.progress import LiveProgress
from trainer.records import PLANNED_CAUSES, Cause, HostChanged, Incident, JournalEvent, MetricsRecord, Recovered

LOG = logging.getLogger("shoal")

# From a planned resize of a small model to the restart of a large one.
_RESIZE_BUCKETS_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_HOST_STATES: tuple[str, ...] = get_args(HostChanged.model_fields["state"].annotation)


@contextlib.contextmanager
def serving_metrics(config: RunConfig) -> Iterator[None]:
    """Answer scrapes on `metrics.port`, if there is one, with what controllers made inside this block tell.

    A port that cannot be opened is a warning: no run ends for want of its dashboard. Leaving takes up to half a second.
    """
    if config.metrics.port is None:
        yield
        return
    metrics = RunMetrics(config.run_name, config.steps)
    try:
        server, thread = start_http_server(config.metrics.port, config.metrics.host, metrics.registry)
    except (OSError, UnicodeError) as error:  # UnicodeError: no possible host name
        LOG.warning(
            "metrics.port %d of %s cannot be opened, so this run's metrics are not served: %s",
            config.metrics.port,
            config.metrics.host,
            error,
        )
        yield
        return
    try:
        with listening(metrics):
            yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class RunMetrics(Collector):
    """A journal listener with a registry of its own: several runs in one process do not mix."""

    def __init__(self, run_name: str, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._progress = LiveProgress(steps)
        self._hosts: dict[str, str] = {}
        self._hosts_lock = threading.Lock()
        self._incidents = Counter(
            "shoal_incidents",
            "Unplanned ends of a worker group since this process opened the run.",
            ("run", "cause"),
            registry=self.registry,
        )
        for cause in sorted(set(get_args(Cause)) - PLANNED_CAUSES):
            self._incidents.labels(run_name, cause)  # a series that begins at 1 has no increase
        self._resizes = Histogram(
            "shoal_resize_seconds",
            "Time without training: from the last step of a worker group to the first of the next.",
            ("run", "planned"),
            buckets=_RESIZE_BUCKETS_SECONDS,
            registry=self.registry,
        )
        for planned in ("true", "false"):
            self._resizes.labels(run_name, planned)
        self._run_name = run_name
        self._clock = clock
        self.registry.register(self)

    def __call__(self, item: JournalEvent | MetricsRecord) -> None:
        self._progress.update(item)
        match item:
            case Incident():
                self._incidents.labels(self._run_name, item.cause).inc()
            case Recovered():
                self._resizes.labels(self._run_name, str(item.planned).lower()).observe(item.down_seconds)
            case HostChanged():
                with self._hosts_lock:
                    self._hosts[item.host_id] = item.state
            case _:
                pass

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What is true at the time of the scrape: goodput changes while nothing happens. Leaves out what is unknown."""
        view = self._progress.look(self._clock())
        training = view.activity == "training"
        values = [
            ("shoal_step", "Last finished step.", view.step),
            ("shoal_steps", "Steps of the whole run.", view.steps),
            (
                "shoal_committed_step",
                "Step of the newest committed checkpoint, 0 before the first.",
                view.committed_step or 0,
            ),
            ("shoal_loss", "Loss of the last finished step.", view.loss),
            (
                "shoal_tokens_per_second",
                "Tokens trained per second, 0 while no steps are made.",
                (view.tokens_per_second if training else None) or 0.0,
            ),
            (
                "shoal_goodput_ratio",
                "Part of the time since this process opened the run that became steps, 0 to 1.",
                view.goodput,
            ),
        ]
        for name, meaning, value in values:
            family = GaugeMetricFamily(name, meaning, labels=("run",))
            if value is not None:
                family.add_metric((self._run_name,), value)
            yield family
        with self._hosts_lock:
            states = Tally(self._hosts.values())
        hosts = GaugeMetricFamily("shoal_hosts", "Hosts of the pool by state.", labels=("run", "state"))
        for state in _HOST_STATES:
            hosts.add_metric((self._run_name, state), states[state])
        yield hosts
