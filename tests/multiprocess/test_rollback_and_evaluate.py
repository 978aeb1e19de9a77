"""The `rollback` and `evaluate` deployments of a real service, used through Prefect's API as its UI does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.multiprocess.harness import SAVE_INTERVAL, STEPS, Run, assert_same_training, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS, Service
from trainer.control.catalog import Catalog
from trainer.records import RunEnded

pytestmark = pytest.mark.slow

TO_STEP = STEPS - 3 * SAVE_INTERVAL


def submit(service: Service, flow: str, parameters: dict[str, Any]) -> str:
    deployment = service.call("GET", f"/deployments/name/{flow}/{flow}")
    body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
    return str(service.call("POST", f"/deployments/{deployment['id']}/create_flow_run", body)["id"])


def question(service: Service, flow_run: str) -> tuple[str, dict[str, Any]]:
    """What the UI shows behind Resume: the description, and the schema of the form."""
    keys = service.wait_state(flow_run, "Suspended")["state"]["state_details"]["run_input_keyset"]
    wait_until(lambda: service.flow_process() is None, PATIENCE_SECONDS, lambda: "its process ends")

    def read(key: str) -> Any:
        return service.call("GET", f"/flow_runs/{flow_run}/input/{keys[key]}")

    return read("description"), read("schema")


def resume(service: Service, flow_run: str, **answer: Any) -> None:
    assert service.call("POST", f"/flow_runs/{flow_run}/resume", {"run_input": answer})["status"] == "ACCEPT"


def evaluation(service: Service, parameters: dict[str, Any]) -> tuple[str, str]:
    """The step that was evaluated, and its loss, as the artifact shows them."""
    flow_run = submit(service, "evaluate", parameters)
    service.wait_state(flow_run, "Completed")
    (page,) = service.call("POST", "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
    assert page["key"] == "shoal-run-evaluation"
    rows = dict(re.findall(r"(?m)^\| (\w+) \| (.*) \|$", page["data"]))
    assert "that the run does not train on" in rows["samples"]
    return rows["step"], rows["loss"].strip("*")


def test_a_run_is_evaluated_rolled_back_and_trained_again_to_the_same_end(
    new_run: Callable[..., Run], new_service: Callable[..., Service], reference: Run
) -> None:
    run = new_run(**{"checkpoint.keep_last_n": 10})
    service = new_service({"one": run})
    service.start(run.cwd, SHOAL_TEST_ROW_SECONDS="0")
    which = {"storage": str(run.directory.parent), "run_name": "run"}
    service.wait_state(service.submit("one"), "Completed")
    commits = Catalog(run.store).commits()

    # Evaluating is repeatable, and sees what training has learnt.
    newest = evaluation(service, which)
    assert newest[0] == str(STEPS)
    assert evaluation(service, which) == newest
    first = evaluation(service, which | {"step": SAVE_INTERVAL})
    losses = [record.loss for record in reference.history().metrics]
    assert float(newest[1]) < float(first[1])
    assert float(newest[1]) == pytest.approx(sum(losses[-10:]) / 10, rel=0.5)

    # Neither leaves the roots that the service lists.
    for flow in ("rollback", "evaluate"):
        refused = submit(service, flow, which | {"storage": str(run.cwd)})
        assert "allow.storage_roots" in service.wait_state(refused, "Failed")["state"]["message"]

    # Not confirmed: nothing is done.
    rollback = which | {"to_step": TO_STEP, "reason": "the loss went up"}
    flow_run = submit(service, "rollback", rollback)
    shown, form = question(service, flow_run)
    assert f"back to step | **{TO_STEP}** (`checkpoints/" in shown
    assert f"finished steps that are abandoned | {STEPS - TO_STEP}" in shown
    assert {name: field["type"] for name, field in form["properties"].items()} == {
        "confirm": "boolean",
        "note": "string",
    }
    resume(service, flow_run, confirm=False)
    service.wait_state(flow_run, "Cancelled")
    assert run.store.names("rollbacks") == []

    # Confirmed; and a second question that was asked before has become void by it.
    flow_run = submit(service, "rollback", rollback)
    question(service, flow_run)
    too_late = submit(service, "rollback", which)
    question(service, too_late)
    resume(service, flow_run, confirm=True, note="seen by two")
    service.wait_state(flow_run, "Completed")
    (record,) = Catalog(run.store).rollbacks()
    assert (record.to_step, record.from_step, record.reason) == (TO_STEP, STEPS, "the loss went up seen by two")
    resume(service, too_late, confirm=True)
    assert "has changed since you were asked" in service.wait_state(too_late, "Failed")["state"]["message"]
    assert len(run.store.names("rollbacks")) == 1
    history = run.history()
    assert (history.step, history.state) == (TO_STEP, "stopped")

    # Training goes on from there to the same end, and what was abandoned is still there.
    service.wait_state(service.submit("one"), "Completed")
    assert run.of(RunEnded)[-1].outcome == "complete"
    assert_same_training(run, reference, abandoned=STEPS - TO_STEP)
    assert evaluation(service, which) == newest
    assert [commit.step for commit in commits if commit.step > TO_STEP] == [60, 50, 40]
    for commit in commits:
        assert Catalog(run.store).problem(commit) is None
        assert f"{commit.step}.{commit.incarnation}.json" in run.store.names("commits")
    assert service.stop() == 0
    run.assert_nothing_left()
