"""The Prefect UI in a real browser: a run is started from the form, watched, loses its process, and is retried.

Needs Debian's `chromium`. A screenshot of each stage is kept in $SHOAL_TEST_ARTIFACTS, or else in pytest's directory of
the test; the one in the README was made by this test.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.multiprocess.harness import Run, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS, Service
from trainer.records import CheckpointCommitted, RunEnded, RunOpened

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the UI must do without the rest of the world
]
STEPS = 40

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """An empty page of a browser that has never been used."""
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch_persistent_context(
            tmp_path / "browser",
            executable_path=CHROMIUM,
            args=FLAGS,
            viewport={"width": 1280, "height": 800},
        ) as context,
    ):
        context.set_default_timeout(PATIENCE_SECONDS * 1000)
        expect.set_options(timeout=PATIENCE_SECONDS * 1000)
        yield context.pages[0]


@pytest.fixture
def picture(page: Page, tmp_path: Path) -> Callable[[str], None]:
    """Keeps what the browser shows under a name."""
    directory = Path(os.environ.get("SHOAL_TEST_ARTIFACTS", tmp_path / "screenshots"))

    def take(name: str) -> None:
        page.wait_for_load_state("networkidle")
        page.screenshot(path=directory / f"{name}.png", animations="disabled")

    return take


def open_artifact(page: Page, run_page: str, key: str) -> None:
    """From the page of the flow run, as soon as the artifact is there. The list does not renew itself."""

    def listed() -> bool:
        page.goto(run_page)
        page.get_by_role("tab", name="Artifacts").click()
        page.wait_for_load_state("networkidle")
        return page.get_by_role("link", name=key).is_visible()

    wait_until(listed, PATIENCE_SECONDS, lambda: f"{key} is listed on {run_page}")
    page.get_by_role("link", name=key).click()


def test_a_run_started_from_the_form_is_watched_and_after_its_process_died_retried(
    new_run: Callable[..., Run], new_service: Callable[..., Service], page: Page, picture: Callable[[str], None]
) -> None:
    run = new_run(env={"SHOAL_TEST_ROW_SECONDS": "0.1"}, run_name="browsed", **{"num_hosts.max": 2})
    service = new_service({"browsed": run}, continue_crashed=False)
    service.start(run.cwd, SHOAL_TEST_ROW_SECONDS="0.1")  # 0.8 s a step: it outlasts the clicks below

    # The form has the settings of the run; one is changed.
    page.goto(f"http://127.0.0.1:{service.port}")
    page.get_by_role("link", name="Deployments").click()
    page.get_by_role("link", name="browsed").click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").click()
    steps = page.get_by_role("spinbutton", name="Steps", exact=True)
    expect(steps).to_have_value(str(run.config["steps"]))
    expect(page.get_by_text("Optimizer steps of the whole run.")).to_be_visible()
    steps.fill(str(STEPS))
    picture("1-form")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("link", name="View run").click()

    # It trains, and says how far it is.
    main = page.get_by_role("main")
    expect(main.get_by_text("Running", exact=True)).to_be_visible()
    run_page = page.url
    open_artifact(page, run_page, "shoal-browsed-progress")
    expect(page.get_by_role("cell", name=re.compile(rf"^\d+ of {STEPS}$"))).to_be_visible()
    run.wait_event(CheckpointCommitted, timeout=PATIENCE_SECONDS)
    page.reload()
    expect(page.get_by_role("cell", name="training", exact=True)).to_be_visible()
    picture("2-progress")

    # Its process dies. Nothing continues it, as this service was told.
    process = service.flow_process()
    assert process is not None
    process.kill()
    page.goto(run_page)
    expect(main.get_by_text("Crashed", exact=True)).to_be_visible()
    picture("3-crashed")

    # Somebody presses Retry.
    page.get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name="Retry").click()
    dialog = page.get_by_role("alertdialog", name="Retry Flow Run")
    expect(dialog).to_be_visible()
    picture("4-retry")
    dialog.get_by_role("button", name="Retry").click()
    expect(main.get_by_text("Running", exact=True)).to_be_visible()
    expect(main.get_by_text("Completed", exact=True)).to_be_visible()
    picture("5-completed")

    # What happened can be read, and its plots are drawn without a network.
    open_artifact(page, run_page, "shoal-browsed-overview")
    expect(page.get_by_text(f"after {STEPS} steps")).to_be_visible()
    plots = page.get_by_role("main").get_by_role("img")
    expect(plots).to_have_count(2)
    assert all(plot.evaluate("image => image.complete && image.naturalWidth > 100") for plot in plots.all())
    picture("6-overview")
    plots.last.scroll_into_view_if_needed()
    picture("7-plots")

    first, second = run.of(RunOpened)
    assert (first.resumed, second.resumed, second.steps) == (False, True, STEPS)
    assert second.newest_commit is not None
    (ended,) = run.of(RunEnded)
    assert (ended.outcome, ended.step) == ("complete", STEPS)
    assert service.stop() == 0
