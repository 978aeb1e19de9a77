"""What Prometheus is told of a run, and that no run depends on it."""

from __future__ import annotations

import logging
import math
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.run_directory_builder import RunDirectoryBuilder, play_disturbed_run
from tests.test_progress import metrics, opened, played_back, stamp, starting
from trainer.config import RunConfig, parse_config
from trainer.control.journal import Journal
from trainer.control.prometheus import RunMetrics, serving_metrics
from trainer.errors import StorageError
from trainer.records import HostChanged, StopRequested, Waiting
from trainer.store import LocalStore


def exposed(run_metrics: RunMetrics) -> dict[str, float]:
    """`name{label=value,…}` without the run's own label, which must be everywhere."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(run_metrics.registry).decode()):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["run"] == "quick"
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "run")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def played(run: RunDirectoryBuilder) -> tuple[RunMetrics, float]:
    """Metrics that heard the whole run, at its last moment, and that moment."""
    now = 0.0
    run_metrics = RunMetrics("quick", 300, clock=lambda: now)
    for monotonic, item in played_back(run):
        now = monotonic
        run_metrics(item)
    return run_metrics, now


def test_a_disturbed_run_in_figures(tmp_path: Path) -> None:
    run_metrics, _ = played(play_disturbed_run(tmp_path / "run"))
    samples = exposed(run_metrics)
    assert (samples["shoal_step"], samples["shoal_steps"], samples["shoal_committed_step"]) == (300, 300, 300)
    assert samples["shoal_incidents_total{cause=host_lost}"] == 2
    assert samples["shoal_incidents_total{cause=worker_stuck}"] == 0
    assert not any("completed" in name or "drained" in name for name in samples), "planned ends are no incidents"
    assert samples["shoal_resize_seconds_count{planned=false}"] == 2
    assert samples["shoal_resize_seconds_count{planned=true}"] == 1
    assert samples["shoal_resize_seconds_sum{planned=true}"] > 0
    assert 0.5 < samples["shoal_goodput_ratio"] < 1
    assert samples["shoal_tokens_per_second"] == 0, "it is over"
    assert samples["shoal_loss"] > 0


def test_what_is_not_known_yet_is_not_exposed() -> None:
    samples = exposed(RunMetrics("quick", 100))
    assert "shoal_loss" not in samples
    assert "shoal_goodput_ratio" not in samples
    assert (samples["shoal_step"], samples["shoal_committed_step"]) == (0, 0)


def test_speed_falls_to_zero_while_the_run_waits_and_goodput_goes_on_falling() -> None:
    now = 2.0
    run_metrics = RunMetrics("quick", 100, clock=lambda: now)
    for item in (opened(), starting(4, at=0.5), metrics(1), metrics(2)):
        run_metrics(item)
    assert exposed(run_metrics)["shoal_tokens_per_second"] == 2000
    assert exposed(run_metrics)["shoal_goodput_ratio"] == 0.5
    run_metrics(Waiting(**stamp(2.0), usable=0, needed=1, reason="no hosts"))
    now = 10.0
    assert exposed(run_metrics)["shoal_tokens_per_second"] == 0
    assert exposed(run_metrics)["shoal_goodput_ratio"] == 0.1


def test_each_host_is_counted_in_its_newest_state_only() -> None:
    run_metrics = RunMetrics("quick", 100)
    for host, state in [("a", "starting"), ("b", "starting"), ("a", "ready"), ("b", "ready"), ("b", "lost")]:
        run_metrics(HostChanged(**stamp(1.0), host_id=host, state=state))
    samples = exposed(run_metrics)
    assert {name: value for name, value in samples.items() if name.startswith("shoal_hosts")} == {
        "shoal_hosts{state=starting}": 0,
        "shoal_hosts{state=ready}": 1,
        "shoal_hosts{state=lost}": 1,
        "shoal_hosts{state=withdrawn}": 0,
    }


def test_a_loss_that_is_not_finite_is_exposed_as_it_is() -> None:
    run_metrics = RunMetrics("quick", 100)
    run_metrics(metrics(1, loss=math.nan))
    assert math.isnan(exposed(run_metrics)["shoal_loss"])


def config(port: int | None) -> RunConfig:
    return parse_config({"run_name": "quick", "steps": 100, "metrics": {"port": port}})


def fail(error: StorageError) -> None:
    raise AssertionError(f"the storage failed: {error}")


def test_the_port_answers_with_what_the_journal_told_and_closes_with_the_run(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}/metrics"
    with serving_metrics(config(port)):
        Journal(LocalStore(tmp_path), "a", on_trouble=fail).record_metrics((metrics(7),))
        with urllib.request.urlopen(address, timeout=10.0) as response:
            assert 'shoal_step{run="quick"} 7.0' in response.read().decode()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10.0)


def test_a_taken_port_is_one_warning_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING), serving_metrics(config(port)):
            journal = Journal(LocalStore(tmp_path), "a", on_trouble=fail)
            journal.record(StopRequested, reason="test")
    (warning,) = caplog.records
    assert f"metrics.port {port}" in warning.getMessage()


def test_without_a_port_nothing_is_started() -> None:
    before = threading.enumerate()
    with serving_metrics(config(None)):
        assert threading.enumerate() == before
