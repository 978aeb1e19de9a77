"""Alerts: each kind really fires on a real server, and is sent through a notification block."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.events.actions import PauseDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.registration import AUTOMATION_PREFIX, alerts, notification_block_id, register_automations
from deployments.serve_config import AlertsConfig
from tasks.events import GOODPUT, GOODPUT_LABEL, RunEvent
from tasks.watching import prefect_board
from tests.multiprocess.harness import PATIENCE_SECONDS, Run, wait_until
from trainer.records import Recovered, Waiting

pytestmark = pytest.mark.slow

ALERTS = AlertsConfig(
    incidents_per_hour=2,
    goodput_below=0.5,
    no_progress_seconds=10,
    waiting_seconds=10,
    notification_block="custom-webhook/test-alerts",
)


class Receiver(BaseHTTPRequestHandler):
    """Where the notification block posts to."""

    server: Inbox

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Inbox(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.received: list[dict[str, str]] = []

    def of(self, alert: str) -> list[str]:
        """Bodies of the notifications of one alert so far."""
        subject = f"{AUTOMATION_PREFIX}alert, {alert}"
        return [message["body"] for message in list(self.received) if message["subject"] == subject]

    def wait(self, alert: str) -> str:
        body, *_ = wait_until(lambda: self.of(alert), PATIENCE_SECONDS, lambda: f"{alert}: {self.received}")
        return body


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox() as inbox:
        threading.Thread(target=inbox.serve_forever, daemon=True).start()
        yield inbox
        inbox.shutdown()


async def register(url: str) -> None:
    message = {"subject": "{{subject}}", "body": "{{body}}"}
    block = CustomWebhookNotificationBlock(name="test", url=url, json_data=message)
    await block.save("test-alerts", overwrite=True)
    assert ALERTS.notification_block is not None
    async with get_client() as client:
        assert await notification_block_id(client, "custom-webhook/no-such-block") is None
        found = await notification_block_id(client, ALERTS.notification_block)
        assert found is not None
        await register_automations(client, alerts(ALERTS, found))
        await register_automations(client, alerts(ALERTS, found))  # the next start of a service makes no second ones
        assert len([a for a in await client.read_automations(limit=200) if a.name.startswith(AUTOMATION_PREFIX)]) == 5


async def make_an_action_fail() -> None:
    async with get_client() as client:
        automation = await client.create_automation(
            AutomationCore(
                name="pauses a deployment that does not exist",
                trigger=EventTrigger(expect={GOODPUT}),
                actions=[PauseDeployment(source="selected", deployment_id=uuid4())],
            )
        )
        with prefect_board(uuid4()) as board:
            board.publish("alarming", RunEvent(name=GOODPUT, labels={GOODPUT_LABEL: "50"}))
            board.publish("alarming", RunEvent(name=GOODPUT, payload={"goodput": 0.497}, labels={GOODPUT_LABEL: "49"}))
        return automation


async def unregister(automation: Any) -> None:
    async with get_client() as client:
        await client.delete_automation(automation)
        await register_automations(client, [])
        assert await client.read_automations() == []


def names_of_events(api: str, run: Run) -> list[str]:
    """What the event feed shows of a run, in order."""
    resource = {"id": [f"shoal.run.{run.config['run_name']}"]}
    query = {"filter": {"resource": resource, "order": "ASC"}, "limit": 50}
    found = httpx.post(f"{api}/events/filter", json=query, timeout=30.0).raise_for_status().json()["events"]
    flow_runs = {
        r["prefect.resource.id"] for e in found for r in e["related"] if r["prefect.resource.role"] == "flow-run"
    }
    assert len(flow_runs) == 1, "each event names the flow run that told it"
    return [event["event"] for event in found]


def test_each_kind_of_alert_fires_and_is_sent(new_run: Callable[..., Run], prefect_api: str, inbox: Inbox) -> None:
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        asyncio.run(register(f"http://127.0.0.1:{inbox.server_port}/"))

        run = new_run(
            run_name="alarming",
            steps=1000,
            env={"SHOAL_TEST_ROW_SECONDS": "0.02"},
            **{"num_hosts.max": 1, "checkpoint.save_interval_steps": 1000},
        )
        run.start()
        run.wait_step(2)
        assert inbox.of("incidents") == []
        for incidents in (1, 2):
            run.kill_worker("host-0")
            wait_until(
                lambda n=incidents: len(run.of(Recovered, lambda e: not e.planned)) == n, PATIENCE_SECONDS, run.story
            )
        assert "alarming" in inbox.wait("incidents")
        assert "alarming" in inbox.wait("no progress")

        run.set_capacity(0)
        reason = run.wait_event(Waiting).reason
        assert reason in inbox.wait("waiting")
        run.interrupt()
        run.wait_end()
        # The server writes events down some seconds after it has them.
        told = wait_until(
            lambda: "shoal.ended" in (names := names_of_events(prefect_api, run)) and names,
            PATIENCE_SECONDS,
            lambda: f"the last event: {names_of_events(prefect_api, run)}",
        )
        assert told[0] == "shoal.started"
        assert told[-1] == "shoal.ended"
        assert told.count("shoal.incident") == 2

        # A low goodput is told from ten minutes on, which is longer than this test.
        automation = asyncio.run(make_an_action_fail())
        assert "0.497" in inbox.wait("low goodput")
        assert "pause-deployment" in inbox.wait("failed action")
        asyncio.run(unregister(automation))
