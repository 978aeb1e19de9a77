"""The report can be made of any run that finished a step."""

import io
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.run_directory_builder import RunDirectoryBuilder, play_disturbed_run
from trainer.history import RunHistory
from trainer.report import build_report, plot_loss, plot_throughput, render_markdown


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectoryBuilder:
    return play_disturbed_run(tmp_path_factory.mktemp("runs") / "quickstart")


def section(page: str, title: str) -> list[str]:
    """Lines of the section of that title."""
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0].splitlines()


def table_rows(page: str, title: str) -> list[list[str]]:
    lines = [line for line in section(page, title) if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_report_is_a_page_and_two_pictures_inside_the_run_directory(disturbed: RunDirectoryBuilder) -> None:
    where = build_report(disturbed.store)
    assert where == str(disturbed.store.root / "report" / "report.md")
    page = Path(where).read_text()
    for name in ("loss.png", "throughput.png"):
        assert f"({name})" in page
        picture = matplotlib.image.imread(io.BytesIO(disturbed.store.path(f"report/{name}").read_bytes()))
        assert picture.shape[:2] == (600, 1200)
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 100


def test_a_run_without_a_step_has_no_report(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    assert build_report(run.store) is None
    run.open()
    run.start_group(2)
    assert build_report(run.store) is None
    assert run.store.names("report") == []


def test_the_summary_compares_the_final_loss_with_the_baseline(disturbed: RunDirectoryBuilder) -> None:
    page = render_markdown(RunHistory.load(disturbed.store))
    summary = page.split("\n\n")[1]
    assert "**300 steps**" in summary
    assert "The final loss is **2.3" in summary
    assert "(mean of the last 20 steps), clearly below the 4.610 of a unigram model of the same bytes." in summary
    assert "2 incidents, 1 planned resize, 38 steps trained again" in summary


def test_a_loss_above_the_baseline_is_not_called_below_it(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(2)
    run.train(3)
    page = render_markdown(RunHistory.load(run.store))
    assert "not below the 4.610 of a unigram model" in page
    assert "**dead** after **3 of 300 steps**" in page


@pytest.mark.parametrize(
    ("steps", "averaged", "words"),
    [
        (3, 1, "the last step alone"),
        (39, 3, "mean of the last 3 steps"),
        (290, 20, "mean of the last 20 steps"),
    ],
)
def test_the_loss_of_a_run_on_its_way_is_the_mean_of_few_of_its_steps_and_not_called_final(
    tmp_path: Path, steps: int, averaged: int, words: str
) -> None:
    """The curve falls fast at first: a mean over a large part of a short run would be far from where it stands."""
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(2)
    run.train(steps)
    history = RunHistory.load(run.store)
    loss = np.mean([record.loss for record in history.metrics[-averaged:]])
    page = render_markdown(history)
    assert f"The loss at step {steps} is **{loss:.3f}** ({words})" in page
    assert "final" not in page.split("\n\n")[1]


def test_the_tables_name_incidents_segments_and_kinds_of_badput(disturbed: RunDirectoryBuilder) -> None:
    history = RunHistory.load(disturbed.store)
    page = render_markdown(history)
    incidents = table_rows(page, "Incidents and resizes")
    assert [(row[1], row[2], row[4], row[5]) for row in incidents] == [
        ("host-2 lost", "host lost", "118", "18"),
        ("grow 3→4", "planned: more hosts offered", "150", "0"),
        ("host-1 lost", "host lost", "220", "20"),
    ]
    assert [row[7] for row in incidents] == ["checkpoint 100", "checkpoint 150", "checkpoint 200"]
    assert "compile 500" in incidents[0][8]
    assert [row[2] for row in table_rows(page, "Segments")] == [
        f"{segment.start_step} → {segment.end_step}" for segment in history.segments
    ]
    assert {row[5] for row in table_rows(page, "Segments")} == {"completed", "host lost"}
    shares = [float(row[2].rstrip("%")) for row in table_rows(page, "Where the time went")]
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.6)
    assert "crc32c:1f2e3d4c" in page
    assert "global_batch_size: 16" in page


def test_no_table_names_a_planned_change_after_how_it_was_done(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(4)
    for hosts in (2, 3, 3):
        run.train(run.step + 5)
        run.end_group("drained")
        run.continue_on(hosts, cause="drained", planned=True, from_step=run.step)
    page = render_markdown(RunHistory.load(run.store))
    assert [(row[1], row[2]) for row in table_rows(page, "Incidents and resizes")] == [
        ("shrink 4→2", "planned: fewer hosts offered"),
        ("grow 2→3", "planned: more hosts offered"),
        ("planned restart", "planned: another topology"),
    ]
    assert {row[5] for row in table_rows(page, "Segments")} == {"planned resize"}
    assert "drained" not in page


def test_a_message_cannot_break_a_table(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(2)
    run.train(3)
    run.lose_host("host|1\nx")
    (row,) = table_rows(render_markdown(RunHistory.load(run.store)), "Incidents and resizes")
    assert row[3] == r"host\|1 x"


def test_damage_is_named_in_the_report(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(2)
    run.train(3)
    run.break_json("run.json")
    build_report(run.store)
    page = run.store.path("report/report.md").read_text()
    assert any("run.json" in line for line in section(page, "What could not be read"))


def test_each_interruption_is_a_line_in_both_plots_and_the_ribbon_names_the_hosts(
    disturbed: RunDirectoryBuilder,
) -> None:
    history = RunHistory.load(disturbed.store)
    loss, throughput = plot_loss(history), plot_throughput(history)
    for figure in (loss, throughput):
        labels = [text.get_text() for text in figure.texts]
        assert sum(label.startswith(("host-2 lost", "grow 3→4", "host-1 lost")) for label in labels) == 3
        assert [text.get_text() for text in figure.axes[1].texts] == ["4 hosts", "3 hosts", "4 hosts", "3 hosts"]
    marks = [line for line in loss.axes[0].lines if line.get_linestyle() in ("--", ":")]
    assert {118.0, 150.0, 220.0} <= {float(np.asarray(line.get_xdata())[0]) for line in marks}


def test_the_ribbon_joins_groups_of_one_size_over_steps_but_shows_the_gap_over_time(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(2)
    run.train(10)
    run.lose_host("host-1")
    run.continue_on(2, cause="host_lost", planned=False, from_step=10)
    run.train(20)
    history = RunHistory.load(run.store)
    assert len(plot_loss(history).axes[1].patches) == 1
    assert len(plot_throughput(history).axes[1].patches) == 2


@pytest.mark.filterwarnings("error")
def test_without_a_journal_there_is_still_a_report(tmp_path: Path) -> None:
    run = play_disturbed_run(tmp_path / "run")
    run.store.delete_tree("journal")
    assert build_report(run.store)
    assert "goodput **unknown**" in run.store.path("report/report.md").read_text()


def test_labels_never_lie_over_each_other_however_many_incidents_there_are(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(2)
    for step in range(2, 120, 2):
        run.train(step)
        run.lose_host("host-1")
        run.continue_on(2, cause="host_lost", planned=False, from_step=step - 1)
    figure = plot_loss(RunHistory.load(run.store))
    boxes = [text.get_window_extent() for text in figure.texts if text.get_text() == "host-1 lost"]
    assert 10 < len(boxes) < 59
    assert not any(left.overlaps(right) for number, left in enumerate(boxes) for right in boxes[:number])


def test_a_label_at_the_edge_stays_inside_the_picture(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(2)
    run.train(50)
    run.lose_host("a-host-with-a-name-that-reaches-over-the-edge")
    figure = plot_loss(RunHistory.load(run.store))
    (label,) = [text for text in figure.texts if text.get_text().endswith("edge lost")]
    box = label.get_window_extent()
    assert figure.bbox.x0 < box.x0 < box.x1 < figure.bbox.x1


@pytest.mark.filterwarnings("error")
def test_one_step_is_enough_and_a_loss_that_is_not_finite_is_no_obstacle(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "run")
    run.open()
    run.start_group(1)
    run.train(1)
    assert build_report(run.store)
    line = run.metrics_line(2, step_seconds=0.0).model_dump_json().encode()
    run.store.write("metrics/1/2.jsonl", re.sub(rb'"loss":[^,]+', b'"loss":Infinity', line) + b"\n")
    assert build_report(run.store)
    assert "**inf**" in run.store.path("report/report.md").read_text()


def test_importing_the_report_does_not_import_matplotlib() -> None:
    """Flows import this module; its drawing library costs most of a second."""
    code = "import sys, trainer.report; sys.exit('matplotlib' in sys.modules or 'prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
