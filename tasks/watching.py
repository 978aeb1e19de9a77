"""What a person sees of a run in the Prefect UI: live progress, an overview after each incident, a true state, events.

Training never waits for Prefect. The run's journal is heard without blocking; a thread of its own tells Prefect the
newest state every few seconds. What could not be told is dropped, not queued: the next telling says what is true then.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, Protocol, Self
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Running

from tasks.events import RESOURCE_PREFIX, RunEvent, RunEvents
from trainer import records
from trainer.control.journal import listening
from trainer.control.run import OpenedRun
from trainer.errors import LeaseError, ShoalError, StorageError
from trainer.history import RunHistory, duration_text
from trainer.narration import hosts
from trainer.progress import LiveProgress, ProgressView
from trainer.records import JournalEvent, MetricsRecord
from trainer.report import draw_plots, read_plots, render_overview
from trainer.store import Store

LOG = logging.getLogger("shoal")

WAITING_STATE = "WaitingForCapacity"
_RUNNING_STATE = "Running"

_INTERVAL_SECONDS = 3.0
# Drawing takes a second or two of one core, which training could use.
_OVERVIEW_INTERVAL_SECONDS = 30.0
# Only Prefect taking a living flow run for dead is found by looking, and that is no hurry.
_LOOK_AT_STATE_SECONDS = 30.0
_REQUEST_SECONDS = 2.5
# Longer than the two requests of a change of state.
_CLOSING_SECONDS = 6.0


Standing = Literal["runs", "taken for dead", "ends"]


class Board(Protocol):
    """Where a flow run is shown. Calls block for seconds at most.

    They raise httpx.HTTPError or PrefectException if what they were given is not shown.
    """

    def show(self, key: str, markdown: str) -> None:
        """Show a page under this key, in place of what was shown under it before."""

    def standing(self) -> Standing:
        """What Prefect thinks of the flow run, which in truth runs: its process asks."""

    def set_running_state(self, name: str, message: str) -> None:
        """Give the flow run a running state of this name."""

    def publish(self, run_name: str, event: RunEvent) -> None:
        """Hand an event over. Does not block; an event that cannot be delivered is lost."""


class Watcher:
    """A journal listener that shows a run on a board. Use as a context manager; controllers are made inside it."""

    def __init__(
        self,
        store: Store,
        run_name: str,
        steps: int,
        board: AbstractContextManager[Board],
        *,
        interval_seconds: float = _INTERVAL_SECONDS,
        closing_seconds: float = _CLOSING_SECONDS,
        look_at_state_seconds: float = _LOOK_AT_STATE_SECONDS,
    ) -> None:
        self._store = store
        self._run_name = run_name
        self._opening_board = board
        self._interval_seconds = interval_seconds
        self._closing_seconds = closing_seconds
        self._look_at_state_seconds = look_at_state_seconds
        self._progress = LiveProgress(steps)
        self._events = RunEvents()
        self._listening = listening(self)
        # The thread sees the settings and the flow run of whoever makes the watcher.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._tell_until_closed,), daemon=True)
        self._news = threading.Event()
        self._closing = threading.Event()
        self._run_is_anothers = False
        self._resumed = False
        self._overview_due = threading.Event()
        self._overview_told_at = -_OVERVIEW_INTERVAL_SECONDS
        self._changing_state = threading.Lock()
        self._state_let_go = False
        self._state_told: str | None = _RUNNING_STATE
        self._next_look_at_state = time.monotonic() + look_at_state_seconds
        self._page_told = ""
        self._away = False

    def __enter__(self) -> Self:
        self._listening.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the end and return, after a few seconds at most."""
        self._listening.__exit__(kind, error, trace)
        deadline = time.monotonic() + self._closing_seconds
        self.let_go_of_state()
        # Who lost the lease knows no more of the run, and who leaves in a hurry is followed by one who goes on.
        self._run_is_anothers = kind is not None and issubclass(kind, LeaseError)
        if kind is None or (issubclass(kind, ShoalError) and not self._run_is_anothers):
            self._overview_due.set()
        else:
            self._overview_due.clear()
        self._closing.set()
        self._news.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def let_go_of_state(self) -> None:
        """From now on the flow run's state is left alone: whoever sets a final one comes last.

        Prefect's server lets a run go from Completed back to Running, so a change that is under way is waited for:
        longer than its requests may take, a few seconds at most.
        """
        self._state_let_go = True
        if self._changing_state.acquire(timeout=self._closing_seconds):
            self._changing_state.release()

    # --- hearing (on the controller's thread) ------------------------------------------------------------------------

    def __call__(self, item: JournalEvent | MetricsRecord) -> None:
        self._progress.update(item)
        self._events.hear(item)
        match item:
            case records.RunOpened():
                self._resumed = item.resumed
            case records.FirstStep() if self._resumed:  # what interrupted the run was before this process
                self._resumed = False
                self._overview_due.set()
            case records.Recovered():
                self._overview_due.set()
            case records.Waiting() | records.GroupStarting() | records.Incident() | records.StopRequested():
                self._news.set()
            case _:
                pass

    # --- telling (on a thread of its own) ----------------------------------------------------------------------------

    def _tell_until_closed(self) -> None:
        try:
            with self._opening_board as board:
                closed = False
                while not closed:
                    self._news.wait(self._interval_seconds)
                    self._news.clear()
                    closed = self._closing.is_set()
                    self._tell(board)
        except Exception:
            LOG.exception("nothing more of this run is shown in the Prefect UI; the run itself goes on")

    def _tell(self, board: Board) -> None:
        try:
            now = time.monotonic()
            view = self._progress.look(now)
            self._tell_events(board, view, now)
            self._tell_state(board, view, now)
            self._tell_progress(board, view)
            self._tell_overview(board)
        except (httpx.HTTPError, PrefectException) as error:
            if not self._away:
                LOG.warning("the Prefect server does not take what its UI should show, which will lag: %r", error)
            self._away = True
        except StorageError as error:
            LOG.warning("no overview for the Prefect UI: %s", error)
        else:
            self._away = False

    def _tell_events(self, board: Board, view: ProgressView, now: float) -> None:
        events = self._events.due(view, now)
        if self._closing.is_set() and not self._run_is_anothers:
            events += self._events.ended(view)
        for event in events:
            board.publish(self._run_name, event)

    def _tell_state(self, board: Board, view: ProgressView, now: float) -> None:
        waiting = view.activity == "waiting for capacity"
        name = WAITING_STATE if waiting else _RUNNING_STATE
        with self._changing_state:
            if self._state_let_go or (name == self._state_told and now < self._next_look_at_state):
                return
            standing = board.standing()
            self._next_look_at_state = now + self._look_at_state_seconds
            if self._state_let_go or standing == "ends" or (standing == "runs" and name == self._state_told):
                return
            self._state_told = None  # a request that fails may have been carried out all the same
            board.set_running_state(name, view.detail if waiting else "")
            self._state_told = name

    def _tell_progress(self, board: Board, view: ProgressView) -> None:
        page = render_progress(view, self._run_name, self._store.location)
        if page != self._page_told:
            board.show(artifact_key(self._run_name, "progress"), page)
            self._page_told = page

    def _tell_overview(self, board: Board) -> None:
        closing = self._closing.is_set()
        now = time.monotonic()
        early = now < self._overview_told_at + _OVERVIEW_INTERVAL_SECONDS
        if not self._overview_due.is_set() or (early and not closing):
            return
        self._overview_due.clear()
        history = RunHistory.load(self._store, living_at=None if closing else time.time())
        if not history.steps:
            return
        # At the end the flow has just drawn them for the report.
        plots = read_plots(self._store) if closing else draw_plots(history)
        try:
            board.show(artifact_key(self._run_name, "overview"), render_overview(history, plots))
        except (httpx.HTTPError, PrefectException):
            self._overview_due.set()
            raise
        self._overview_told_at = now


def artifact_key(run_name: str, what: str) -> str:
    """The key of a run's artifact: lowercase letters, digits and dashes, different for different names."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower())
    if plain != run_name:
        plain = f"{plain}-{hashlib.sha256(run_name.encode()).hexdigest()[:8]}"
    return f"shoal-{plain}-{what}"


def render_progress(view: ProgressView, run_name: str, location: str) -> str:
    """The live page."""
    fraction = min(1.0, view.step / view.steps)
    bar = "█" * round(20 * fraction)
    training = view.activity == "training"
    rows = [("doing", f"**{view.activity}**" + (f": {_cell(view.detail)}" if view.detail else ""))]
    rows.append(("step", f"{view.step} of {view.steps}"))
    if view.loss is not None:
        rows.append(("loss", f"{view.loss:.4f}"))
    if training and view.step_seconds and view.tokens_per_second is not None:
        rows.append(("rate", f"{1 / view.step_seconds:,.2f} steps/s, {view.tokens_per_second:,.0f} tokens/s"))
    if view.topology is not None:
        rows.append(("hosts", f"{hosts(view.topology.num_processes)}, mesh {view.topology.mesh}"))
    rows.append(("committed", "nothing yet" if view.committed_step is None else f"step {view.committed_step}"))
    if view.goodput is not None:
        rows.append(("goodput", f"{view.goodput:.0%} since this flow run began to train"))
    if training and view.seconds_left is not None:
        rows.append(("time left", f"about {duration_text(view.seconds_left)}"))
    rows.append(("run directory", f"`{location}`"))
    return "\n".join(
        [
            f"### {run_name}: {view.activity}",
            "",
            f"`{bar:░<20}` {fraction:.0%}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
        ]
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


class PrefectBoard:
    """The artifacts, the state and the events of one flow run. Each page is one artifact, changed in place."""

    def __init__(self, client: SyncPrefectClient, flow_run_id: UUID) -> None:
        self._client = client
        self._flow_run_id = flow_run_id
        self._artifacts: dict[str, UUID] = {}

    def show(self, key: str, markdown: str) -> None:
        # prefect.artifacts can only add a new version each time, and a run has thousands of them to show.
        if (known := self._artifacts.get(key)) is not None:
            try:
                self._client.update_artifact(known, ArtifactUpdate(data=markdown))
            except ObjectNotFound:  # somebody deleted it
                del self._artifacts[key]
            else:
                return
        page = ArtifactCreate(key=key, type="markdown", data=markdown, flow_run_id=self._flow_run_id)
        self._artifacts[key] = self._client.create_artifact(page).id

    def standing(self) -> Standing:
        state = self._client.read_flow_run(self._flow_run_id).state
        if state is None or state.is_running():
            return "runs"
        # Pending is left alone: a process that is being started for it will find out that this one trains.
        return "taken for dead" if state.is_crashed() or state.is_scheduled() else "ends"

    def set_running_state(self, name: str, message: str) -> None:
        # Still of the type Running: any other would stop Prefect's engine or its watch over heartbeats.
        self._client.set_flow_run_state(self._flow_run_id, Running(name=name, message=message))

    def publish(self, run_name: str, event: RunEvent) -> None:
        # Prefect's own thread sends it, and adds the flow run, its deployment and its tags.
        resource = {"prefect.resource.id": RESOURCE_PREFIX + run_name, "prefect.resource.name": run_name}
        emit_event(event.name, resource=resource | event.labels, payload=event.payload)


@contextlib.contextmanager
def prefect_board(flow_run_id: UUID) -> Iterator[PrefectBoard]:
    """A board with a client of its own: the flow's must not be held up. Each call is tried once."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": _REQUEST_SECONDS}, sync_client=True) as client,
    ):
        yield PrefectBoard(client, flow_run_id)


def watching(run: OpenedRun) -> Watcher:
    """Show a run on the flow run that this is called in."""
    return Watcher(run.store, run.config.run_name, run.config.steps, prefect_board(UUID(flow_run.id)))
