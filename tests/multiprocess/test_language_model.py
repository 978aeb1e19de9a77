"""The built-in language model under the faults that the other tests try on a smaller job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.multiprocess.harness import Run, assert_complete, assert_same_training
from trainer.records import Incident, Recovered

LANGUAGE_MODEL = {
    "job": "lm",
    "job_params": {
        "num_layers": 1,
        "embed_dim": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "mlp_dim": 64,
        "seq_len": 16,
        "dropout": 0.1,
    },
}


@pytest.mark.slow
def test_a_language_model_that_lost_a_host_has_the_loss_curve_of_one_that_did_not(new_run: Callable[..., Run]) -> None:
    undisturbed = new_run("undisturbed", **LANGUAGE_MODEL)
    undisturbed.start()
    assert_complete(undisturbed, undisturbed.wait_end())

    run = new_run("disturbed", **LANGUAGE_MODEL)
    run.start()
    run.wait_step(22)
    run.kill_host("host-1")
    assert run.wait_event(Incident).cause == "host_lost"
    assert_complete(run, run.wait_end())
    assert [(r.from_hosts, r.to_hosts) for r in run.of(Recovered)] == [(4, 3), (3, 4)]
    assert_same_training(run, undisturbed)


@pytest.mark.slow
def test_the_default_model_learns_more_than_how_often_each_byte_occurs(new_run: Callable[..., Run]) -> None:
    """The quickstart's model, data and steps, on one host because that is quicker here."""
    run = new_run(
        job="lm",
        job_params={"preset": "0.5m", "dropout": 0.1},
        steps=300,
        **{"num_hosts.max": 1, "checkpoint.save_interval_steps": 100},
    )
    run.start()
    assert_complete(run, run.wait_end(), steps=300)
    history = run.history()
    assert history.run is not None
    baseline = history.run.data.baseline_loss
    assert baseline is not None
    assert 3.0 < baseline < 3.5, "nats per byte of Python source"
    last = [metrics.loss for metrics in history.metrics[-30:]]
    assert sum(last) / len(last) < baseline - 1.0
    report = run.store.read("report/report.md")
    assert report is not None
    assert f"{baseline:.2f}" in report.decode()
