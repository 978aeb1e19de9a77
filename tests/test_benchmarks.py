"""The benchmarks' figures follow from what was measured, and their commands work at their smallest size."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import orchestration, overhead, recovery, segment_loop, servers, trace_replay
from benchmarks.common import BenchmarkError, ShoalRun, Summary, quickstart
from benchmarks.orchestration import MeasuredGrowth, SegmentCosts
from benchmarks.overhead import VARIANTS, Measurement, Variant
from benchmarks.recovery import Grow, Kill, Recovery
from benchmarks.segment_loop import Block, Side
from tests.run_directory_builder import host_names, play_disturbed_run, topology_of
from trainer.config import load_config
from trainer.control.runtime import agent_files, runtime_root, tidy
from trainer.history import RunHistory
from trainer.records import (
    FirstStep,
    GroupStarting,
    Incident,
    PhaseName,
    Recovered,
    SegmentEnded,
    SegmentStarted,
    WorkerPhase,
    to_json,
)

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 600.0


def rendered(table: Table) -> list[list[str]]:
    """Title first, then the rows, split at wide gaps."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [[cell for cell in line.split("  ") if cell.strip()] for line in console.file.getvalue().splitlines()]


def test_a_summary_gives_median_p90_and_extremes() -> None:
    assert Summary.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Summary(median=3.0, p90=4.6, least=1.0, most=5.0)
    assert Summary.of([2.0]) == Summary(median=2.0, p90=2.0, least=2.0, most=2.0)


def test_the_quickstart_is_measured_at_the_size_asked_for(tmp_path: Path) -> None:
    config = quickstart(tmp_path, "one", 3, 5, steps=7, checkpoint__save_interval_steps=2)
    usual = load_config(ROOT / "examples" / "quickstart.yaml")
    assert (config.run_name, config.storage, config.steps) == ("one", str(tmp_path / "runs"), 7)
    assert (config.num_hosts.max, config.engine.devices_per_host, config.checkpoint.save_interval_steps) == (3, 5, 2)
    assert (config.job, config.job_params, config.optimizer) == (usual.job, usual.job_params, usual.optimizer)


def test_a_journal_is_followed_by_whole_lines(tmp_path: Path) -> None:
    run = ShoalRun(quickstart(tmp_path, "one", 1, 1), tmp_path)
    assert run.look() == []
    first, second, third = (
        FirstStep(time=float(step), monotonic=0.0, incarnation=2, controller="c", step=step) for step in (1, 2, 3)
    )
    part = run.store.root / "journal" / "2" / "0.jsonl"
    part.parent.mkdir(parents=True)
    line = to_json(second)
    part.write_bytes(to_json(first) + line[:20])
    assert run.look() == [first]
    part.write_bytes(to_json(first) + line)
    (part.parent / "1.jsonl").write_bytes(to_json(third))
    assert run.look() == [first, second, third]
    assert run.look() == [first, second, third]


# --- overhead ------------------------------------------------------------------------------------------------------


def measurement(round_: int, variant: Variant, milliseconds: float, **changes: Any) -> Measurement:
    """Ten steps of that length."""
    fields: dict[str, Any] = {
        "round": round_,
        "variant": variant,
        "step_seconds": (milliseconds / 1e3,) * 10,
        "tokens_per_step": 1000,
        "loss": 2.5,
        "busy_before": 0.0,
    }
    return Measurement(**(fields | changes))


def two_rounds() -> list[Measurement]:
    """The second round is twice as slow throughout, as on a machine that others came to use."""
    variants: tuple[tuple[Variant, float, int], ...] = (
        ("bare", 100, 0),
        ("step", 101, 0),
        ("control", 102, 0),
        ("checkpoints", 110, 2),
    )
    return [
        measurement(round_, variant, factor * milliseconds, saves=saves, blocking_seconds=0.01 * saves)
        for round_, factor in ((0, 1.0), (1, 2.0))
        for variant, milliseconds, saves in variants
    ]


def test_each_variant_takes_each_place_of_a_round() -> None:
    orders = [overhead.order_of_round(round_) for round_ in range(len(VARIANTS))]
    assert all(sorted(order) == sorted(VARIANTS) for order in orders)
    assert [set(places) for places in zip(*orders, strict=True)] == [set(VARIANTS)] * len(VARIANTS)


def test_ratios_are_taken_within_a_round() -> None:
    assert overhead.ratios(two_rounds(), "checkpoints", "bare") == pytest.approx([1 / 1.1] * 2)
    assert overhead.extra_seconds(two_rounds(), "step", "bare") == pytest.approx([0.001, 0.002])
    without_last_bare = [one for one in two_rounds() if (one.round, one.variant) != (1, "bare")]
    assert overhead.ratios(without_last_bare, "step", "bare") == pytest.approx([1 / 1.01])


def test_throughput_is_of_the_whole_time_and_not_of_the_median_step() -> None:
    halted = measurement(0, "bare", 0, step_seconds=(0.1,) * 9 + (1.1,))
    assert halted.steps_per_second == pytest.approx(5.0)
    assert halted.mean_step_seconds == pytest.approx(0.2)


def test_what_a_checkpoint_costs_is_the_time_over_a_run_without() -> None:
    # 10 steps of 8 ms more with 2 saves, then the same twice as slow: 40 and 80 ms a save.
    assert overhead.save_cost_seconds(two_rounds()) == pytest.approx(0.06)
    usual = overhead.ratio_at_interval(two_rounds(), 50)
    assert usual == pytest.approx((1 / 1.02) / (1 + 0.06 / (50 * 0.153)))
    never_saved = [measurement(0, variant, 100) for variant in VARIANTS]
    assert overhead.save_cost_seconds(never_saved) is None
    assert overhead.ratio_at_interval(never_saved, 50) is None


def test_saves_are_as_frequent_within_a_run_as_in_the_quickstart() -> None:
    usual = load_config(ROOT / "examples" / "quickstart.yaml")
    assert overhead.scaled_save_interval(usual.steps, usual) == usual.checkpoint.save_interval_steps
    assert overhead.scaled_save_interval(60, usual) == 10
    assert overhead.scaled_save_interval(1, usual) == 1


def test_the_tables_of_overhead_hold_each_variant_and_each_cause() -> None:
    rows = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rendered_rows(overhead.throughput_table)}
    assert rows["(a) bare loop"] == ["7.50", "5.00 … 10.00", "7,500", "150.0", "1.000", "1.000 … 1.000"]
    assert rows["(d) Shoal with checkpoints"][-2:] == ["0.909", "0.909 … 0.909"]
    causes = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rendered_rows(overhead.causes_table)}
    assert causes["checkpoints (d/c)"] == ["0.927", "0.927 … 0.927", "+12.00", "+8.0%"]
    assert causes["all of Shoal (d/a)"] == ["0.909", "0.909 … 0.909", "+15.00", "+10.0%"]


def rendered_rows(make: Callable[[list[Measurement]], Table]) -> list[list[str]]:
    return [row for row in rendered(make(two_rounds())) if row]


@pytest.mark.parametrize(("milliseconds", "verdict"), [(103, "met"), (104, "missed")])
def test_the_target_is_judged_by_the_pairs(milliseconds: float, verdict: str) -> None:
    ones = [*two_rounds(), measurement(2, "bare", 100)]
    ones = [one for one in ones if one.variant != "checkpoints"]
    ones += [measurement(round_, "checkpoints", milliseconds * (2 if round_ == 1 else 1)) for round_ in range(3)]
    assert f"(target 0.97: {verdict})" in overhead.result_lines(ones, 10, 50)[0]


def test_on_a_busy_machine_the_target_is_not_judged() -> None:
    disturbed = [measurement(0, variant, 100, busy_before=0.5) for variant in VARIANTS]
    lines = overhead.result_lines(disturbed, 10, 50)
    assert "(target 0.97: not judged, the machine was in use)" in lines[0]
    assert "most 50%" in lines[-1]


def test_variants_that_trained_something_else_are_refused() -> None:
    overhead.check_same_work([measurement(0, "bare", 100, loss=2.6), *two_rounds()[1:]])
    with pytest.raises(BenchmarkError, match="same thing"):
        overhead.check_same_work([*two_rounds(), measurement(2, "control", 100, loss=2.6)])


# --- recovery ------------------------------------------------------------------------------------------------------

KILLED_AT = 1000.0
PHASES: tuple[PhaseName, ...] = (
    "import",
    "assignment",
    "rendezvous",
    "devices",
    "restore",
    "data",
    "trace",
    "compile",
    "first_step",
)


def killed_run(*, failed_starts: int = 0) -> Iterator[Any]:
    """host-1 of four is killed at step 55; its commit is at 50. Each phase ends a second after the one before."""

    def stamp(seconds: float, incarnation: int) -> dict[str, Any]:
        return {"time": KILLED_AT + seconds, "monotonic": seconds, "incarnation": incarnation, "controller": "c"}

    yield FirstStep(**stamp(-50.0, 1), step=1)
    yield Incident(
        **stamp(0.75, 1),
        cause="host_lost",
        host_ids=("host-1",),
        step=55,
        alive=3,
        total=4,
        message="host-1 lost",
        detected_seconds=0.125,
    )
    for attempt in range(failed_starts + 1):
        starting = stamp(1.25 + 4.0 * attempt, 2 + attempt)
        yield GroupStarting(**starting, cause="host_lost", topology=topology_of(host_names(3)))
    incarnation, start = 2 + failed_starts, 1.25 + 4.0 * failed_starts
    for number, phase in enumerate(PHASES, start=1):
        for process, late in ((0, 0.5), (1, 0.0)):
            yield WorkerPhase(
                **stamp(start + number - late, incarnation),
                host_id=f"host-{process}",
                process_index=process,
                phase=phase,
                seconds=2.0,
            )
    yield FirstStep(**stamp(start + 9.5, incarnation), step=51)
    yield Recovered(
        **stamp(start + 9.5, incarnation),
        cause="host_lost",
        planned=False,
        from_hosts=4,
        to_hosts=3,
        step=55,
        resumed_from=50,
        down_seconds=11.0,
        phases={"detect": 0.125, "stop": 0.25, "plan": 0.125, **dict.fromkeys(PHASES, 2.0)},
    )
    yield Recovered(
        **stamp(40.0, incarnation + 1),
        cause="drained",
        planned=True,
        from_hosts=3,
        to_hosts=4,
        step=80,
        resumed_from=80,
        down_seconds=5.0,
        phases={"stop": 1.0, "plan": 0.5, "compile": 3.0},
        hosts=("host-1",),
    )


KILL = Kill(host_id="host-1", step=55, time=KILLED_AT)


def recovered_run(**changes: Any) -> Recovery:
    found = recovery.recovery_from(KILL, list(killed_run(**changes)))
    assert found is not None
    return found


def test_a_recovery_lasts_from_the_kill_to_the_next_finished_step() -> None:
    found = recovered_run()
    assert found.seconds == 10.75
    assert (found.from_hosts, found.to_hosts, found.step, found.steps_lost) == (4, 3, 55, 5)


def test_the_critical_path_adds_up() -> None:
    path = recovered_run().path
    assert {name: path[name] for name in ("detect", "stop", "flow", "plan")} == {
        "detect": 0.5,
        "stop": 0.25,
        "flow": 0.375,
        "plan": 0.125,
    }
    assert [path[phase] for phase in PHASES] == [1.0] * 8 + [1.5]
    assert path["other"] == 0.0


def test_phases_of_different_workers_overlap_and_other_says_by_how_much() -> None:
    assert recovered_run().slowest["other"] == 10.75 - 0.5 - 9 * 2.0


def test_a_second_failure_on_the_way_counts_as_other() -> None:
    found = recovered_run(failed_starts=1)
    assert found.seconds == 14.75
    assert found.path["other"] == 4.0
    assert found.path["flow"] == 0.375


@pytest.mark.parametrize("known", range(24))
def test_no_recovery_is_seen_before_its_end(known: int) -> None:
    events = list(killed_run())
    seen = recovery.recovery_from(KILL, events[:known])
    assert (seen is None) == (known < len(events) - 1)


def test_an_earlier_kill_is_not_taken_for_this_one() -> None:
    later = Kill(host_id="host-1", step=90, time=KILLED_AT + 60)
    assert recovery.recovery_from(later, list(killed_run())) is None


def test_only_the_way_back_to_full_size_is_a_grow() -> None:
    events = list(killed_run())
    assert recovery.grows_in(events, 4) == [
        Grow(
            from_hosts=3,
            to_hosts=4,
            seconds=5.0,
            steps_lost=0,
            slowest={"stop": 1.0, "plan": 0.5, "compile": 3.0, "other": 0.5},
        )
    ]
    assert recovery.grows_in(events, 5) == []


def test_the_tables_of_recovery_hold_what_was_measured() -> None:
    recoveries, grows = [recovered_run(), recovered_run(failed_starts=1)], recovery.grows_in(list(killed_run()), 4)
    summary = {
        row[0].strip(): [cell.strip() for cell in row[1:]]
        for row in rendered(recovery.summary_table(recoveries, grows))
        if row
    }
    assert summary["kill to next finished step, s"] == ["2", "12.75", "14.35", "10.75", "14.75"]
    assert summary["steps lost by the planned grow"] == ["1", "0", "0", "0", "0"]
    phases = {
        row[0].strip(): [cell.strip() for cell in row[1:]]
        for row in rendered(
            recovery.phases_table(
                "both", {"path": [one.path for one in recoveries], "own": [one.slowest for one in recoveries]}
            )
        )
        if row
    }
    assert phases["compile"] == ["1.00"] * 4 + ["2.00"] * 4
    assert phases["flow (Prefect, between segment and resize)"] == ["0.38"] * 4 + ["-"] * 4
    only_grow = rendered(recovery.phases_table("grow", {"own": [one.slowest for one in grows]}))
    assert not any(row and row[0].startswith("detect") for row in only_grow)


def test_a_grow_that_lost_steps_misses_its_target() -> None:
    lossless, lossy = (
        Grow(from_hosts=3, to_hosts=4, seconds=1.0, steps_lost=lost, slowest={"other": 1.0}) for lost in (0, 2)
    )
    assert "met" in recovery.result_lines([recovered_run()], [lossless], 0.0)[1]
    assert "missed" in recovery.result_lines([recovered_run()], [lossless, lossy], 0.0)[1]


# --- trace_replay --------------------------------------------------------------------------------------------------


def test_a_replay_is_counted_from_the_journal(tmp_path: Path) -> None:
    history = RunHistory.load(play_disturbed_run(tmp_path).store)
    values = trace_replay.figures(history)
    assert (values["grown"], values["shrunk"], values["other resizes"]) == (1, 0, 0)
    assert (values["incidents"], values["waits"]) == (2, 0)
    assert values["steps trained again"] == len(history.abandoned) == 38
    shown = {row[0].strip(): row[1].strip() for row in rendered(trace_replay.replay_table(values)) if len(row) > 1}
    assert shown["incidents"] == "2"


def test_a_replay_whose_steps_consumed_something_else_gives_no_figures(tmp_path: Path) -> None:
    run = play_disturbed_run(tmp_path)
    history = RunHistory.load(run.store)
    config = quickstart(tmp_path, "replay", 4, 2, steps=300)
    with pytest.raises(BenchmarkError, match="step 1 did not consume its samples"):
        trace_replay.check_digests(history, config)
    with pytest.raises(BenchmarkError, match="not every one of the 301 steps"):
        trace_replay.check_digests(history, config.model_copy(update={"steps": 301}))


# --- orchestration -------------------------------------------------------------------------------------------------


def test_only_what_lies_between_two_segments_of_a_block_counts() -> None:
    """Four segments, each of which starts 0.25 s after the end of the one before and lasts 0.75 s."""
    heard: list[SegmentStarted | SegmentEnded] = []
    for index in range(4):
        stamp = {"time": 0.0, "incarnation": 1, "index": index, "start_step": index}
        heard.append(SegmentStarted(**stamp, monotonic=float(index), until_step=index + 1))
        heard.append(SegmentEnded(**stamp, monotonic=index + 0.75, end_step=index + 1, cause="completed"))
    gaps, lengths = segment_loop.intervals(heard)
    assert gaps == [0.25, 0.25]
    assert lengths == [1.0, 1.0]


def block(side: Side, gap: float, *, length: float = 0.5) -> Block:
    return Block(
        side=side,
        segments=4,
        gap_seconds=[gap] * 3,
        segment_seconds=[length] * 3,
        flow_cpu_seconds=4 * gap,
        server_cpu_seconds=2 * gap,
    )


def segment_costs(
    *, log: int = 14, steps_per_segment: int = 5, gaps: tuple[float, float] = (0.010, 0.014)
) -> SegmentCosts:
    """The second pair, in the other order, on a machine of half the speed."""
    bare, prefect = gaps
    blocks = [block("bare", bare), block("prefect", prefect), block("prefect", 2 * prefect), block("bare", 2 * bare)]
    rows = {**dict.fromkeys(servers.TABLES, 30), "task_run": 10, "log": log}
    gained = servers.Contents(size=10**6, rows=rows, log_bytes=2000)
    return SegmentCosts(
        server="sqlite", steps_per_segment=steps_per_segment, blocks=blocks, prefect_segments=10, gained=gained
    )


def test_what_prefect_adds_is_taken_within_each_pair() -> None:
    assert segment_costs().added(orchestration.gap) == pytest.approx([4.0, 8.0])
    assert segment_costs().added(orchestration.length) == [0.0, 0.0]
    assert segment_costs().added(orchestration.server_cpu) == pytest.approx([2.0, 4.0])


def test_the_tables_of_segments_hold_what_was_measured() -> None:
    rows = {
        row[0].strip(): [cell.strip() for cell in row[1:]]
        for row in rendered(orchestration.costs_table([segment_costs()]))
        if row
    }
    assert rows["server on SQLite: flow's thread between segments"] == ["15.00", "21.00", "+6.00", "+4.00 … +8.00"]
    (_, _, left) = rendered(orchestration.database_table([segment_costs()]))
    assert [cell.strip() for cell in left] == [
        "server on SQLite",
        *("5", "100.0", "1,000", "3,000", "3,000", "3,000", "1,400", "3,000", "200.0"),
    ]


@pytest.mark.parametrize(("milliseconds", "verdict"), [(199, "met"), (201, "missed")])
def test_prefects_share_is_judged_at_long_segments(milliseconds: float, verdict: str) -> None:
    """The pairs add this and twice this: 1.5 times it are a hundredth of 30 s or not."""
    (line,) = orchestration.segment_lines([segment_costs(gaps=(0.0, milliseconds / 1000))])
    assert f"(target 1%: {verdict})" in line


def test_a_log_line_for_each_step_is_noticed() -> None:
    few = segment_costs()
    assert few.steps == 85
    assert "met" in orchestration.log_line(few, segment_costs(steps_per_segment=50))
    chatty = segment_costs(steps_per_segment=50, log=14 + 850)
    assert "854 after 850 (target, they do not grow with the steps: missed)" in orchestration.log_line(few, chatty)


def measured_growth(later: float = 0.0, *, lost: int = 0) -> MeasuredGrowth:
    recovered = Recovered(
        time=1009.0 + later,
        monotonic=0.0,
        incarnation=3,
        cause="drained",
        planned=True,
        from_hosts=2,
        to_hosts=4,
        step=80,
        resumed_from=80 - lost,
        down_seconds=5.0 + later,
        phases={"stop": 0.25, "import": 2.0, "trace": 0.5, "compile": 1.5 + later},
    )
    return MeasuredGrowth(
        offered=1000.0,
        event=1001.0,
        created=1001.25,
        picked_up=1002.0,
        running=1003.5,
        given=1003.75,
        recovered=recovered,
    )


def test_the_way_of_a_growth_adds_up() -> None:
    path = measured_growth().path()
    assert list(path.values()) == [1.0, 0.25, 0.75, 1.5, 0.25, 0.25, 5.0]
    assert sum(path.values()) == 9.0
    assert measured_growth().seconds == 8.0


def test_the_table_of_growths_names_each_part() -> None:
    table = orchestration.growth_table([measured_growth(), measured_growth(1.0)])
    rows = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rendered(table) if row}
    assert rows["… flow: hosts given"] == ["0.25", "0.25", "0.25"]
    assert rows["of it compile"] == ["2.00", "1.50", "2.50"]
    assert rows["from the event to the first step"] == ["8.50", "8.00", "9.00"]


def test_a_growth_is_judged_and_its_cold_start_told() -> None:
    text = " ".join(orchestration.growth_lines([measured_growth()]))
    assert "8.0 s (target 5 s: missed)" in text
    assert "2.8 s of it until the hosts are given" in text
    assert "Down: 5.0 s, of which workers that start cold take 4.0 s" in text
    assert "lost 0 steps (target 0: met)" in text
    assert "target 0: missed" in " ".join(orchestration.growth_lines([measured_growth(lost=1)]))


# --- the commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("main", "arguments", "complaint"),
    [
        (overhead.main, ["--steps", "5", "--warmup-steps", "5"], "smaller than --steps"),
        (overhead.main, ["--rounds", "0"], "smaller than 1"),
        (recovery.main, ["--hosts", "1"], "survive"),
        (orchestration.main, ["--hosts", "1"], "half of them"),
        (orchestration.main, ["--segments", "2"], "left out"),
        (orchestration.main, ["--servers", "sqlite,oracle"], "choose some of embedded,sqlite,postgres"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(
    main: Callable[[list[str]], int], arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("main", [overhead.main, recovery.main])
def test_help_names_every_option(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--hosts", "--devices-per-host", "--json"))


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Where a command leaves nothing: no file, no process, nothing in shared memory."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    yield {**os.environ, "TMPDIR": str(scratch)}
    assert list(scratch.iterdir()) == []
    assert processes_of(scratch) == []
    root = runtime_root()
    assert [agent.run for _, agent in agent_files(root) if agent.run.startswith(str(scratch))] == []
    assert [path for path in root.glob("controllers/*.json") if str(scratch) in path.read_text()] == []
    tidy(root)


def processes_of(scratch: Path) -> list[list[str]]:
    """Command lines of what lives with its PREFECT_HOME below `scratch`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT_HOME", "").startswith(str(scratch)):
                found.append(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def run_command(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


@pytest.mark.slow
def test_overhead_measures_every_variant(tmp_path: Path, environment: dict[str, str]) -> None:
    """One host of one device, one round."""
    figures = tmp_path / "figures.json"
    size = ("--rounds", "1", "--hosts", "1", "--devices-per-host", "1", "--steps", "6", "--warmup-steps", "2")
    finished = run_command(
        environment, "benchmarks.overhead", *size, "--save-interval-steps", "3", "--json", str(figures)
    )
    assert finished.returncode == 0, finished.stderr
    assert "all of Shoal (d/a)" in finished.stdout
    document = json.loads(figures.read_text())
    assert [one["variant"] for one in document["measurements"]] == list(VARIANTS)
    assert all(len(one["step_seconds"]) == 4 for one in document["measurements"])
    assert [one["saves"] for one in document["measurements"]] == [0, 0, 0, 2]


@pytest.mark.slow
def test_recovery_measures_a_kill_and_the_way_back(tmp_path: Path, environment: dict[str, str]) -> None:
    """Two hosts of one device each, one kill."""
    figures = tmp_path / "figures.json"
    size = ("--kills", "1", "--hosts", "2", "--devices-per-host", "1")
    finished = run_command(environment, "benchmarks.recovery", *size, "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    assert "kill to next finished step" in finished.stdout
    document = json.loads(figures.read_text())
    (one,) = document["recoveries"]
    assert (one["from_hosts"], one["to_hosts"]) == (2, 1)
    assert 3 <= one["steps_lost"] < document["options"]["save_interval_steps"] + 10
    assert 0 < sum(one["path"].values()) == pytest.approx(one["seconds"])
    assert [grow["steps_lost"] for grow in document["grows"]] == [0]


@pytest.mark.soak
def test_orchestration_measures_segments_and_growth(tmp_path: Path, environment: dict[str, str]) -> None:
    """One pair of blocks against one server, one growth from one host to two."""
    figures = tmp_path / "figures.json"
    size = ("--servers", "sqlite", "--pairs", "1", "--segments", "4", "--growths", "1", "--hosts", "2")
    finished = run_command(environment, "benchmarks.orchestration", *size, "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    assert "flow's thread between segments" in finished.stdout
    document = json.loads(figures.read_text())
    few, many = document["segments"]
    assert [block["side"] for block in few["blocks"]] == ["prefect", "bare"]
    # The bare side's segments are no task runs: a first one with its resize, and those of the block.
    assert few["gained"]["rows"]["task_run"] == many["gained"]["rows"]["task_run"] == 1 + 1 + 4
    assert few["gained"]["rows"]["log"] - 6 <= 5
    (growth,) = document["growths"]
    order = ("offered", "event", "created", "picked_up", "running", "given")
    assert [growth[name] for name in order] == sorted(growth[name] for name in order)
    assert (growth["recovered"]["from_hosts"], growth["recovered"]["to_hosts"]) == (1, 2)
    assert growth["recovered"]["step"] == growth["recovered"]["resumed_from"]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(environment: dict[str, str]) -> None:
    scratch = Path(environment["TMPDIR"])
    command = [sys.executable, "-m", "benchmarks.recovery", "--hosts", "2", "--devices-per-host", "1"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(scratch.glob("*/runs/recovery/metrics/*/*.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert "interrupted" in error
