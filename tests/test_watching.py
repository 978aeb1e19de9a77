"""What the Prefect UI is told of a run, and that telling it holds up nobody. The board is a fake, except at the end."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types.names import raise_on_name_alphanumeric_dashes_only

from tasks.events import RunEvent
from tasks.watching import WAITING_STATE, Standing, Watcher, artifact_key, prefect_board, render_progress
from tests.run_directory_builder import RunDirectoryBuilder, play_disturbed_run, topology_of
from tests.test_progress import metrics, opened, stamp, starting
from trainer.config import RUN_NAME_PATTERN
from trainer.errors import LeaseError, StoppedError
from trainer.history import RunHistory
from trainer.progress import LiveProgress, ProgressView
from trainer.records import FirstStep, Recovered, Waiting
from trainer.report import render_overview
from trainer.store import LocalStore

INTERVAL_SECONDS = 0.02


class FakeBoard:
    """Remembers what it was shown. Tests can cut it off, make it hang, or have the flow run cancelled."""

    def __init__(self) -> None:
        self.pages: dict[str, list[str]] = {}
        self.states: list[tuple[str, str]] = []
        self.events: list[str] = []
        self.taken_for_dead = False
        self.calls = 0
        self.looks = 0
        self.away = False
        self.cancelling = False
        self.answers = threading.Event()
        self.answers.set()

    def hang(self) -> None:
        self.answers.clear()

    def answer(self) -> None:
        self.answers.set()

    def _call(self) -> None:
        self.calls += 1
        self.answers.wait()
        if self.away:
            raise httpx.ConnectError("nobody there")

    def show(self, key: str, markdown: str) -> None:
        self._call()
        self.pages.setdefault(key, []).append(markdown)

    def standing(self) -> Standing:
        self.looks += 1
        self._call()
        if self.cancelling:
            return "ends"
        return "taken for dead" if self.taken_for_dead else "runs"

    def set_running_state(self, name: str, message: str) -> None:
        self._call()
        self.states.append((name, message))
        self.taken_for_dead = False

    def publish(self, run_name: str, event: RunEvent) -> None:
        self.events.append(f"{event.name} {run_name}")


@pytest.fixture
def board() -> Iterator[FakeBoard]:
    board = FakeBoard()
    yield board
    board.answer()


def watcher_on(board: FakeBoard, root: Path, *, closing_seconds: float = 5.0) -> Watcher:
    return Watcher(
        LocalStore(root),
        "run",
        100,
        contextlib.nullcontext(board),
        interval_seconds=INTERVAL_SECONDS,
        closing_seconds=closing_seconds,
        look_at_state_seconds=2 * INTERVAL_SECONDS,
    )


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "not within 10 s"
        time.sleep(0.005)


def waiting() -> Waiting:
    return Waiting(**stamp(1.0), usable=0, needed=1, reason="0 of at least 1 hosts are usable")


def recovered() -> Recovered:
    return Recovered(
        **stamp(1.0),
        cause="host_lost",
        planned=False,
        from_hosts=4,
        to_hosts=3,
        step=118,
        resumed_from=100,
        down_seconds=2.0,
        phases={},
    )


# --- pages -----------------------------------------------------------------------------------------------------------


def table(page: str) -> dict[str, str]:
    lines = [line for line in page.splitlines() if line.startswith("| ") and line != "| | |"]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert all(len(row) == 2 for row in cells), cells
    return {name.strip(): value.strip() for name, value in cells}


def test_the_live_page_of_a_run_that_trains() -> None:
    progress = LiveProgress(100)
    for item in (opened(newest_commit=20), starting(4, at=1.0), metrics(21), metrics(22), metrics(23)):
        progress.update(item)
    page = render_progress(progress.look(3.0), "run", "/runs/run")
    assert "`█████░░░░░░░░░░░░░░░` 23%" in page
    assert table(page) == {
        "doing": "**training**",
        "step": "23 of 100",
        "loss": "2.0000",
        "rate": "2.00 steps/s, 2,000 tokens/s",
        "hosts": f"4 hosts, mesh {topology_of(('a', 'b', 'c', 'd')).mesh}",
        "committed": "step 20",
        "goodput": "50% since this flow run began to train",
        "time left": "about 38.5 s",
        "run directory": "`/runs/run`",
    }


def test_the_live_page_of_a_run_that_waits_says_why_and_promises_no_speed() -> None:
    progress = LiveProgress(100)
    for item in (opened(), starting(4, at=1.0), metrics(1), metrics(2), waiting()):
        progress.update(item)
    facts = table(render_progress(progress.look(3.0), "run", "/runs/run"))
    assert facts["doing"] == "**waiting for capacity**: 0 of at least 1 hosts are usable"
    assert not {"rate", "time left", "hosts"} & set(facts)


@given(
    detail=st.text(),
    step=st.integers(0, 2**31),
    steps=st.integers(1, 2**31),
    numbers=st.none() | st.floats(min_value=1e-9, max_value=1e12),
    loss=st.none() | st.floats(),
)
def test_the_live_page_is_one_whole_table_whatever_it_says(
    detail: str, step: int, steps: int, numbers: float | None, loss: float | None
) -> None:
    view = ProgressView(
        activity="training",
        detail=detail,
        step=step,
        steps=steps,
        loss=loss,
        step_seconds=numbers,
        tokens_per_second=numbers,
        topology=None,
        committed_step=None,
        goodput=0.5,
        seconds_left=numbers,
    )
    page = render_progress(view, "run", "/runs/run")
    assert table(page)["committed"] == "nothing yet"
    assert len(page.splitlines()[2]) == len("`" + "█" * 20 + "` " + f"{min(1.0, step / steps):.0%}")


def test_the_overview_has_both_tables_both_pictures_and_the_place(tmp_path: Path) -> None:
    run = play_disturbed_run(tmp_path / "run")
    page = render_overview(RunHistory.load(run.store), {"loss.png": b"one", "throughput.png": b"two"})
    assert f"Run directory: `{run.store.location}`" in page
    (incident,) = [line for line in page.splitlines() if "| host-2 lost |" in line]
    assert "| host lost | host-2 | 118 | 18 |" in incident
    assert "| checkpoint 100 | detect 250, stop 250, plan 1," in incident
    assert sum("| completed |" in line for line in page.splitlines()) == 6
    assert re.findall(r"\(data:image/png;base64,(\w+)=*\)", page) == ["b25l", "dHdv"]
    assert "](loss.png)" not in page


def test_the_overview_of_a_long_run_shows_the_newest_and_says_that_there_is_more(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(2)
    for step in range(2, 122, 2):
        run.train(step)
        run.end_segment("completed")
    page = render_overview(RunHistory.load(run.store), {})
    assert "10 earlier ones are in the report of the run directory." in page
    assert "| 118 → 120 |" in page
    assert "| 18 → 20 |" not in page
    assert page.count("| completed |") == 50


@given(st.from_regex(RUN_NAME_PATTERN, fullmatch=True), st.from_regex(RUN_NAME_PATTERN, fullmatch=True))
def test_keys_of_artifacts_are_legal_stable_and_tell_runs_apart(one: str, other: str) -> None:
    key = artifact_key(one, "progress")
    raise_on_name_alphanumeric_dashes_only(key, field_name="Artifact key")
    assert key == artifact_key(one, "progress") != artifact_key(one, "overview")
    assert (key == artifact_key(other, "progress")) == (one == other)


def test_a_name_that_is_legal_already_is_kept_and_others_differ_even_if_they_look_alike() -> None:
    assert artifact_key("quickstart-2", "progress") == "shoal-quickstart-2-progress"
    assert artifact_key("My_Run", "progress").startswith("shoal-my-run-")
    alike = ["a.b", "a_b", "A.b", "a-b", "a--b"]
    assert len({artifact_key(name, "progress") for name in alike}) == len(alike)


# --- telling ---------------------------------------------------------------------------------------------------------


def test_the_newest_state_is_shown_and_what_was_true_before_is_not_made_up_for(
    board: FakeBoard, tmp_path: Path
) -> None:
    with watcher_on(board, tmp_path) as watcher:
        watcher(opened())
        eventually(lambda: board.pages)
        board.hang()
        for step in range(1, 91):
            watcher(metrics(step))
        board.answer()
        eventually(lambda: "| 90 of 100 |" in board.pages["shoal-run-progress"][-1])
    assert len(board.pages["shoal-run-progress"]) < 20


def test_what_is_shown_already_is_not_sent_again(board: FakeBoard, tmp_path: Path) -> None:
    with watcher_on(board, tmp_path):
        eventually(lambda: board.pages)
        time.sleep(10 * INTERVAL_SECONDS)
    assert len(board.pages["shoal-run-progress"]) == 1


def test_a_board_that_hangs_holds_up_neither_the_listener_nor_for_long_the_end(
    board: FakeBoard, tmp_path: Path
) -> None:
    board.hang()
    with watcher_on(board, tmp_path, closing_seconds=0.3) as watcher:
        watcher(opened())
        eventually(lambda: board.calls)
        started = time.monotonic()
        for step in range(1, 1001):
            watcher(metrics(step))
        heard = time.monotonic() - started
        started = time.monotonic()
    assert heard < 1.0
    assert time.monotonic() - started < 1.0


def test_an_outage_is_one_line_in_the_log_and_is_caught_up_with(
    board: FakeBoard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board.away = True
    with caplog.at_level(logging.WARNING), watcher_on(board, tmp_path) as watcher:
        watcher(opened())
        watcher(waiting())
        eventually(lambda: board.calls > 5)
        assert len(caplog.records) == 1
        assert "nobody there" in caplog.records[0].getMessage()
        board.away = False
        eventually(lambda: board.states)
        eventually(lambda: "**waiting for capacity**" in board.pages.get("shoal-run-progress", [""])[-1])
    assert len(caplog.records) == 1


def test_a_fault_in_the_telling_ends_the_telling_alone(
    board: FakeBoard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    board.show = broken  # type: ignore[method-assign]
    with watcher_on(board, tmp_path) as watcher:
        watcher(opened())
        eventually(lambda: caplog.records)
        watcher(metrics(1))


# --- the state of the flow run ---------------------------------------------------------------------------------------


def test_a_flow_run_that_is_taken_for_dead_is_running_again_and_else_its_state_is_left_alone(
    board: FakeBoard, tmp_path: Path
) -> None:
    with watcher_on(board, tmp_path) as watcher:
        watcher(opened())
        eventually(lambda: board.looks > 2)
        assert board.states == []
        board.taken_for_dead = True
        eventually(lambda: board.states == [("Running", "")])
        looks = board.looks
        eventually(lambda: board.looks > looks + 2)
        assert board.states == [("Running", "")]


def test_the_state_is_renamed_while_the_run_waits_and_back_when_a_group_starts(
    board: FakeBoard, tmp_path: Path
) -> None:
    with watcher_on(board, tmp_path) as watcher:
        for item in (opened(), starting(4, at=1.0), metrics(1)):
            watcher(item)
        eventually(lambda: board.pages)
        assert board.states == [], "it is called Running already"
        watcher(waiting())
        eventually(lambda: board.states)
        watcher(starting(4, at=2.0, cause="drained"))
        eventually(lambda: len(board.states) == 2)
        watcher(metrics(2))
    assert board.states == [(WAITING_STATE, waiting().reason), ("Running", "")]


def test_after_the_end_the_state_is_left_alone(board: FakeBoard, tmp_path: Path) -> None:
    with watcher_on(board, tmp_path) as watcher:
        watcher.let_go_of_state()
        watcher(opened())
        watcher(waiting())
        eventually(lambda: "**waiting for capacity**" in board.pages.get("shoal-run-progress", [""])[-1])
    assert (board.looks, board.states) == (0, [])


def test_a_change_of_state_that_is_under_way_is_waited_for_before_a_final_one_may_be_set(
    board: FakeBoard, tmp_path: Path
) -> None:
    with watcher_on(board, tmp_path) as watcher:
        watcher(opened())
        eventually(lambda: board.pages)
        board.hang()
        calls = board.calls
        watcher(waiting())
        eventually(lambda: board.calls > calls)
        threading.Timer(0.2, board.answer).start()
        started = time.monotonic()
        watcher.let_go_of_state()
        assert time.monotonic() - started > 0.1
    assert (board.looks, board.states) == (1, []), "what had not begun by then is not begun"


def test_a_flow_run_that_is_being_cancelled_keeps_its_state(board: FakeBoard, tmp_path: Path) -> None:
    board.cancelling = True
    with watcher_on(board, tmp_path) as watcher:
        watcher(opened())
        watcher(waiting())
        eventually(lambda: board.calls > 6)
    assert board.states == []


# --- the overview ----------------------------------------------------------------------------------------------------


def test_a_recovery_is_followed_by_an_overview_with_pictures(board: FakeBoard, tmp_path: Path) -> None:
    run = play_disturbed_run(tmp_path / "run")
    with watcher_on(board, run.store.root) as watcher:
        watcher(opened())
        eventually(lambda: board.pages)
        assert "shoal-run-overview" not in board.pages
        watcher(recovered())
        eventually(lambda: "shoal-run-overview" in board.pages)
    assert board.pages["shoal-run-overview"][0].count("data:image/png;base64,") == 2


def test_incidents_in_quick_succession_share_an_overview(board: FakeBoard, tmp_path: Path) -> None:
    run = play_disturbed_run(tmp_path / "run")
    with watcher_on(board, run.store.root) as watcher:
        watcher(opened())
        watcher(recovered())
        eventually(lambda: "shoal-run-overview" in board.pages)
        watcher(recovered())
        calls = board.calls
        watcher(metrics(1))
        eventually(lambda: board.calls > calls)
        assert len(board.pages["shoal-run-overview"]) == 1
    assert len(board.pages["shoal-run-overview"]) == 2, "the end has one of its own"


def test_a_continued_run_shows_what_interrupted_it_after_its_first_step(board: FakeBoard, tmp_path: Path) -> None:
    run = play_disturbed_run(tmp_path / "run")
    with watcher_on(board, run.store.root) as watcher:
        watcher(opened(newest_commit=20))
        watcher(FirstStep(**stamp(1.0), step=21))
        eventually(lambda: "shoal-run-overview" in board.pages)


@pytest.mark.parametrize(
    ("error", "shown"), [(None, True), (StoppedError("by a person"), True), (LeaseError("another's"), False)]
)
def test_the_end_has_an_overview_unless_the_run_is_now_anothers(
    board: FakeBoard, tmp_path: Path, error: Exception | None, shown: bool
) -> None:
    run = play_disturbed_run(tmp_path / "run")
    run.store.write("report/loss.png", b"drawn for the report")
    with contextlib.suppress(StoppedError, LeaseError), watcher_on(board, run.store.root):
        if error is not None:
            raise error
    assert ("shoal-run-overview" in board.pages) == shown
    if shown:
        assert "(data:image/png;base64,ZHJhd24gZm9yIHRoZSByZXBvcnQ=)" in board.pages["shoal-run-overview"][0]


# --- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "last"), [(None, "shoal.ended run"), (KeyboardInterrupt(), "shoal.ended run"), (LeaseError(""), None)]
)
def test_events_are_published_up_to_the_end_unless_the_run_is_now_anothers(
    board: FakeBoard, tmp_path: Path, error: BaseException | None, last: str | None
) -> None:
    board.away = True  # events take their own way to the server
    with contextlib.suppress(KeyboardInterrupt, LeaseError), watcher_on(board, tmp_path) as watcher:
        watcher(opened().model_copy(update={"monotonic": time.monotonic()}))
        eventually(lambda: board.events)
        if error is not None:
            raise error
    assert board.events == ["shoal.started run", *([last] if last is not None else [])]


# --- the real board --------------------------------------------------------------------------------------------------


class Unwell(BaseHTTPRequestHandler):
    """A server in trouble: 503 to everything."""

    def _refuse(self) -> None:
        self.send_error(503)

    do_GET = do_POST = do_PATCH = _refuse  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("listens", [False, True])
def test_a_prefect_server_in_trouble_is_an_error_within_seconds_that_the_watcher_knows(listens: bool) -> None:
    server = HTTPServer(("127.0.0.1", 0), Unwell)
    url = f"http://127.0.0.1:{server.server_port}/api"
    if listens:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        server.server_close()
    started = time.monotonic()
    with temporary_settings({PREFECT_API_URL: url}), prefect_board(uuid4()) as board:
        for call in (lambda: board.show("key", "page"), board.standing):
            with pytest.raises((httpx.HTTPError, PrefectException)):
                call()
    assert time.monotonic() - started < 15.0
    if listens:
        server.shutdown()
        server.server_close()
