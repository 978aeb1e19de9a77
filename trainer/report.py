"""The report of a run: `report/report.md` and two plots, made from the run directory alone.

It can be made of a living, dead or damaged run, and made again at any time; each time it replaces the last one.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from trainer.history import IncidentView, RunHistory, duration_text, rolled_back_text
from trainer.planning.goodput import Kind
from trainer.records import SegmentRecord
from trainer.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

# Okabe and Ito's palette: told apart by color-blind readers, and in grey.
_LOSS_COLOR = "#0072B2"
_INCIDENT_COLOR = "#D55E00"
_PLANNED_COLOR = "#00795A"
_GOODPUT_COLOR = "#8A3B78"
_TEXT_COLOR = "#222222"
_QUIET_COLOR = "#6B6B6B"

_FONT_SIZE = 9.0
_SIZE_INCHES, _DOTS_PER_INCH = (8.0, 4.0), 150  # 1200 x 600 pixels

_MOST_SMOOTHED_STEPS = 101
_END_STEPS = 2
_MOST_LAST_STEPS = 20
_START_NOTE = (
    "Starting processes, imports and compilation count as what made them necessary: program startup the first time "
    "and after a stop, infrastructure recovery after an incident, elastic resize after a planned one."
)

_CAUSE_COLUMNS = ("#", "what", "cause", "hosts", "at step", "steps lost", "down", "restored from", "itemised (ms)")
_PLOTS = {
    "loss.png": "Loss over steps, with the number of hosts underneath",
    "throughput.png": "Throughput and goodput over wall time",
}
# An overview is sent over a network and looked at, not searched: the page in the run directory has every row.
_MOST_ROWS = 50

# A run's process may draw on two threads, and matplotlib's fonts and caches are made for one.
_drawing = threading.Lock()


def build_report(store: Store) -> str | None:
    """Write the report and return where it lies, or None if the run has not finished a step.

    Takes a second or two, nearly all of it in matplotlib.

    Raises:
        StorageError: the run directory cannot be listed or the report cannot be written.
    """
    history = RunHistory.load(store)
    if not history.steps:
        return None
    for name, picture in draw_plots(history).items():
        store.write(f"report/{name}", picture)
    # Last: whoever finds the page finds its pictures.
    store.write("report/report.md", render_markdown(history).encode())
    return f"{store.location}/report/report.md"


def report_is_current(store: Store) -> bool:
    """Whether the report says what the run directory holds now; False if there is none.

    Raises:
        StorageError: the run directory cannot be read.
    """
    page = store.read("report/report.md")
    return page is not None and page == render_markdown(RunHistory.load(store)).encode()


def draw_plots(history: RunHistory) -> dict[str, bytes]:
    """The plots as PNG by file name, of a run that has finished a step. One caller at a time draws; others wait."""
    with _drawing:
        return {"loss.png": _png(plot_loss(history)), "throughput.png": _png(plot_throughput(history))}


def read_plots(store: Store) -> dict[str, bytes]:
    """The plots as the last report left them; empty before the first.

    Raises:
        StorageError: they cannot be read.
    """
    found = {name: store.read(f"report/{name}") for name in _PLOTS}
    return {name: picture for name, picture in found.items() if picture is not None}


# --- plots --------------------------------------------------------------------------------------------------------


def plot_loss(history: RunHistory) -> Figure:
    """Loss over steps, the topology as a ribbon underneath, interruptions marked."""
    figure, axes, ribbon = _figure_with_ribbon()
    steps = np.array([record.step for record in history.metrics], dtype=float)
    loss = np.array([record.loss for record in history.metrics], dtype=float)
    language_model = history.run is not None and history.run.config.job == "lm"

    axes.plot(steps, loss, color=_LOSS_COLOR, linewidth=0.8, alpha=0.4, label="each step")
    window = min(max(3, len(steps) // 20 | 1), _MOST_SMOOTHED_STEPS)
    smooth = _smooth(loss, window)
    axes.plot(steps, smooth, color=_LOSS_COLOR, linewidth=2.0, label=f"mean of {window} steps")
    baseline = history.run.data.baseline_loss if history.run is not None else None
    if baseline is not None:
        name = "unigram model" if language_model else "baseline"
        axes.axhline(baseline, color=_QUIET_COLOR, linewidth=1.2, linestyle=(0, (6, 3)), label=f"{name} {baseline:.2f}")
    axes.set_xlim(0, max(steps[-1], 2.0) * 1.005)
    axes.set_ylabel("loss (nats per token)" if language_model else "loss")
    _limit_loss(axes, loss, smooth, baseline)

    rolled_back = [
        (view.resumed_from, view.step) for view in _shown(history) if view.resumed_from is not None and view.steps_lost
    ]
    _shade(axes, rolled_back, "trained again", color=_QUIET_COLOR, alpha=0.13)
    bands = [
        _Band(span.first_step - 1, span.kept_step, span.num_hosts)
        for span in history.topologies
        if span.kept_step is not None
    ]
    _draw_ribbon(ribbon, bands)
    ribbon.set_xlabel("step")
    marks = [_Mark(incident.step, incident.title, incident.planned) for incident in _shown(history)]
    _finish(figure, axes, f"{_name(history)}: loss", marks)
    return figure


def plot_throughput(history: RunHistory) -> Figure:
    """Tokens per second and goodput over the wall time of the run, with what interrupted it."""
    from matplotlib.ticker import EngFormatter, PercentFormatter

    figure, axes, ribbon = _figure_with_ribbon()
    begin, end = history.started or 0.0, history.ended or 0.0
    unit, unit_seconds = _time_unit(end - begin)

    for incarnation in sorted({point.incarnation for point in history.throughput}):
        points = [point for point in history.throughput if point.incarnation == incarnation]
        times = (np.array([point.time for point in points]) - begin) / unit_seconds
        rates = np.array([point.tokens_per_second for point in points])
        window = min(max(3, len(history.throughput) // 60 | 1), _MOST_SMOOTHED_STEPS)
        axes.plot(times, rates, color=_LOSS_COLOR, linewidth=0.7, alpha=0.35)
        axes.plot(times, _smooth(rates, window), color=_LOSS_COLOR, linewidth=2.0)
    axes.plot([], [], color=_LOSS_COLOR, linewidth=2.0, label="tokens/s")
    axes.set_xlim(0, max((end - begin) / unit_seconds * 1.005, 1e-9))
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))

    def since_start(start: float, end: float) -> tuple[float, float]:
        return (start - begin) / unit_seconds, (end - begin) / unit_seconds

    shown = _shown(history)
    down = [since_start(view.down_since, view.recovered) for view in shown if view.recovered is not None]
    spans = {
        kind: [since_start(span.start, span.end) for span in history.timeline if span.kind is kind]
        for kind in (Kind.WASTED_PROGRESS, Kind.STOPPED)
    }
    _shade(axes, down, "down", color=_INCIDENT_COLOR, alpha=0.2)
    _shade(axes, spans[Kind.WASTED_PROGRESS], "trained again", color=_QUIET_COLOR, alpha=0.13)
    _shade(axes, spans[Kind.STOPPED], "stopped", facecolor="none", edgecolor=_QUIET_COLOR, hatch="//", alpha=0.4)

    goodput_axes = axes.twinx()
    times, fractions = _goodput_over_time(history)
    goodput_axes.plot((times - begin) / unit_seconds, fractions, color=_GOODPUT_COLOR, linewidth=1.2, label="goodput")
    goodput_axes.set_ylim(0, 1)
    goodput_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    goodput_axes.set_ylabel("goodput so far", color=_GOODPUT_COLOR, fontsize=_FONT_SIZE)
    goodput_axes.tick_params(axis="y", colors=_GOODPUT_COLOR, labelsize=_FONT_SIZE)
    goodput_axes.spines[["top", "left", "right"]].set_visible(False)

    bands = [
        _Band((span.started - begin) / unit_seconds, (span.ended - begin) / unit_seconds, span.num_hosts)
        for span in history.topologies
        if span.started is not None and span.ended is not None
    ]
    _draw_ribbon(ribbon, bands)
    ribbon.set_xlabel(f"wall time since the start ({unit})")
    marks = [_Mark((view.down_since - begin) / unit_seconds, _with_down_time(view), view.planned) for view in shown]
    _finish(figure, axes, f"{_name(history)}: throughput", marks)
    return figure


@dataclass(frozen=True)
class _Band:
    left: float
    right: float
    num_hosts: int | None


@dataclass(frozen=True)
class _Mark:
    position: float
    text: str
    planned: bool


def _figure_with_ribbon() -> tuple[Figure, Axes, Axes]:
    # Imported here: it takes most of a second, and the flows that import this module should not wait for it.
    # `Figure` without pyplot draws with Agg, keeps no global state and needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH)
    grid = figure.add_gridspec(2, 1, height_ratios=(15, 1), hspace=0.05, left=0.08, right=0.91, top=0.8, bottom=0.125)
    axes = figure.add_subplot(grid[0])
    ribbon = figure.add_subplot(grid[1], sharex=axes)
    for each in (axes, ribbon):
        each.tick_params(labelsize=_FONT_SIZE, colors=_TEXT_COLOR)
        each.xaxis.label.set_fontsize(_FONT_SIZE)
        each.yaxis.label.set_fontsize(_FONT_SIZE)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    ribbon.spines[:].set_visible(False)
    ribbon.set_yticks([])
    ribbon.set_ylim(0, 1)
    return figure, axes, ribbon


def _shade(axes: Axes, intervals: Iterable[tuple[float, float]], label: str, **style: Any) -> None:
    for number, (left, right) in enumerate(intervals):
        axes.axvspan(left, right, linewidth=0, label=label if number == 0 else None, zorder=0.5, **style)


def _draw_ribbon(ribbon: Axes, bands: Sequence[_Band]) -> None:
    """One bar per unbroken row of groups of the same size: the more hosts, the darker."""
    from matplotlib import colormaps

    joined: list[_Band] = []
    limits = ribbon.get_xlim()
    for band in bands:
        if joined and joined[-1].num_hosts == band.num_hosts and joined[-1].right == band.left:
            joined[-1] = _Band(joined[-1].left, band.right, band.num_hosts)
        else:
            joined.append(band)
    most = max((band.num_hosts for band in joined if band.num_hosts), default=1)
    for band in joined:
        share = (band.num_hosts or 0) / most
        red, green, blue, _ = colormaps["Blues"](0.15 + 0.65 * share)
        ribbon.barh(
            0.5,
            band.right - band.left,
            left=band.left,
            height=1.0,
            color=(red, green, blue),
            edgecolor="white",
            linewidth=1.2,
        )
        width = (band.right - band.left) / (limits[1] - limits[0])
        if band.num_hosts is None:
            label = "?"
        else:
            label = f"{band.num_hosts} host{'s' * (band.num_hosts != 1)}" if width > 0.075 else str(band.num_hosts)
        if width > 0.015:
            ribbon.text(
                (band.left + band.right) / 2,
                0.47,
                label,
                ha="center",
                va="center",
                fontsize=_FONT_SIZE - 1,
                color="white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.6 else _TEXT_COLOR,
            )


def _finish(figure: Figure, axes: Axes, title: str, marks: Sequence[_Mark]) -> None:
    """Title and legend above the axes, marks through them, their labels between: nothing written covers data."""
    figure.text(0.0125, 0.975, title, fontsize=_FONT_SIZE + 3, fontweight="bold", color=_TEXT_COLOR, va="top")
    handles, labels = axes.get_legend_handles_labels()
    for other in figure.axes:
        if other is not axes:
            more_handles, more_labels = other.get_legend_handles_labels()
            handles, labels = handles + more_handles, labels + more_labels
    figure.legend(
        handles,
        labels,
        loc="upper right",
        bbox_to_anchor=(0.99, 0.99),
        ncols=len(labels),
        frameon=False,
        fontsize=_FONT_SIZE,
        handlelength=1.6,
        columnspacing=1.2,
    )
    rows_end = [-np.inf, -np.inf]  # right end of the last label in each row, in pixels
    gap = 8.0
    for mark in sorted(marks, key=lambda mark: mark.position):
        color = _PLANNED_COLOR if mark.planned else _INCIDENT_COLOR
        axes.axvline(mark.position, color=color, linewidth=1.1, linestyle=":" if mark.planned else "--")
        text = figure.text(0, 0, mark.text, ha="center", va="bottom", fontsize=_FONT_SIZE - 1, color=color)
        half = text.get_window_extent().width / 2
        line, top = axes.transData.transform((mark.position, axes.get_ylim()[1]))
        center = min(max(line, half + gap), figure.bbox.width - half - gap)
        row = next((row for row, end in enumerate(rows_end) if center - half > end + gap), None)
        if row is None:
            text.remove()  # a line without words is better than words over words; the table has them all
            continue
        rows_end[row] = center + half
        left, bottom = figure.transFigure.inverted().transform((center, top + 5 + 24 * row))
        text.set_position((float(left), float(bottom)))


def _limit_loss(axes: Axes, loss: Floats, smooth: Floats, baseline: float | None) -> None:
    """Single wild steps, or a loss that was not finite, must not flatten the rest."""
    finite = loss[np.isfinite(loss)]
    if not len(finite):
        return
    values = [finite.min(), np.percentile(finite, 99.5), np.nanmax(smooth), *([] if baseline is None else [baseline])]
    low, high = float(min(values)), float(max(values))
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _smooth(values: Floats, window: int) -> Floats:
    """Centred moving average of the finite values.

    Towards the ends the window shrinks to `_END_STEPS` on both sides: a wide one would flatten the steep beginning.
    """
    position = np.arange(len(values))
    half = np.clip(np.minimum(position, position[::-1]), _END_STEPS, max(window // 2, _END_STEPS))
    left, right = np.maximum(position - half, 0), np.minimum(position + half + 1, len(values))
    finite = np.isfinite(values)
    total = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    count = np.concatenate(([0], np.cumsum(finite)))
    counted = count[right] - count[left]
    mean: Floats = np.full(len(values), np.nan)
    np.divide(total[right] - total[left], counted, out=mean, where=counted > 0)
    return mean


def _goodput_over_time(history: RunHistory) -> tuple[Floats, Floats]:
    """(time, goodput up to it), judged with today's knowledge: a step that was abandoned later never counts."""
    timeline = history.timeline
    if not timeline:
        return np.empty(0), np.empty(0)
    edges = np.array([span.start for span in timeline] + [timeline[-1].end])
    seconds = np.diff(edges)
    productive = np.cumsum(seconds * [span.kind is Kind.PRODUCTIVE_STEP for span in timeline])
    running = np.cumsum(seconds * [span.kind is not Kind.STOPPED for span in timeline])
    times = np.linspace(edges[0], edges[-1], 600)[1:]
    productive_at = np.interp(times, edges, np.concatenate(([0.0], productive)))
    running_at = np.interp(times, edges, np.concatenate(([0.0], running)))
    return times, np.divide(productive_at, running_at, out=np.zeros_like(times), where=running_at > 0)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # No creation date or version inside: the same run gives the same bytes.
    figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


# --- page ---------------------------------------------------------------------------------------------------------


def render_markdown(history: RunHistory) -> str:
    """The page, with relative links to its plots, of a run that has finished a step."""
    parts = [
        f"# Training report: {_name(history)}",
        _summary(history),
        *(f"![{words}]({name})" for name, words in _PLOTS.items()),
        "## Incidents and resizes",
        _incident_table(history.incidents) if history.incidents else "None.",
        "## Where the time went",
        _goodput_table(history),
        _START_NOTE,
        "## Segments",
        _segment_table(history.segments),
        "## Topologies",
        _topology_table(history),
    ]
    if history.run is not None:
        data = history.run.data
        config = yaml.safe_dump(history.run.config.model_dump(mode="json"), sort_keys=False).rstrip()
        parts += [
            "## Data",
            f"{data.description}, {data.num_samples:,} samples. Content hash `{data.content_hash}`.",
            "## Configuration",
            f"As first submitted; job fingerprint `{history.run.job_fingerprint}`.",
            f"```yaml\n{config}\n```",
        ]
    if history.problems:
        parts += ["## What could not be read", "\n".join(f"- {problem}" for problem in history.problems)]
    return "\n\n".join(parts) + "\n"


def render_overview(history: RunHistory, plots: Mapping[str, bytes]) -> str:
    """One page that needs nothing beside it: the plots are inside. For a run that has finished a step.

    Of long lists only the newest rows are shown.
    """
    return "\n\n".join(
        [
            f"# {_name(history)}",
            _summary(history),
            f"Run directory: `{history.location}`",
            "## Incidents and resizes",
            *_earlier(history.incidents),
            _incident_table(history.incidents[-_MOST_ROWS:]) if history.incidents else "None.",
            "## Segments",
            *_earlier(history.segments),
            _segment_table(history.segments[-_MOST_ROWS:]) if history.segments else "None ended yet.",
            *(
                f"![{_PLOTS[name]}](data:image/png;base64,{base64.b64encode(picture).decode()})"
                for name, picture in plots.items()
            ),
        ]
    )


def _earlier(rows: Sequence[object]) -> list[str]:
    left_out = len(rows) - _MOST_ROWS
    return [f"{left_out} earlier ones are in the report of the run directory."] if left_out > 0 else []


def _summary(history: RunHistory) -> str:
    of_steps = f" of {history.total_steps}" if history.total_steps not in (None, history.step) else ""
    sentences = [f"The run is **{history.state}** after **{history.step}{of_steps} steps**."]
    if history.message:
        sentences.append(f"It said: {history.message.rstrip('.')}.")
    told = [text for text in map(rolled_back_text, history.rollbacks) if text != history.message]
    if told:
        sentences.append(f"It was {'; '.join(told)}.")
    sentences.append(_loss_sentence(history))
    unplanned = [view for view in history.incidents if not view.planned]
    planned = len(history.incidents) - len(unplanned)
    sentences.append(
        f"Wall time **{duration_text(history.goodput.running_seconds)}**, "
        f"goodput **{_percent(history.goodput.fraction)}**, "
        f"{_count(len(unplanned), 'incident')}, {_count(planned, 'planned resize')}, "
        f"{_count(len(history.abandoned), 'step')} trained again."
    )
    return " ".join(sentences)


def _loss_sentence(history: RunHistory) -> str:
    """The mean of the last steps, because a single batch says little; of a short run, of few: it falls fast."""
    window = max(1, min(_MOST_LAST_STEPS, len(history.steps) // 10))
    loss = float(np.mean([record.loss for record in history.metrics[-window:]]))
    name = "final loss" if history.state == "complete" else f"loss at step {history.step}"
    steps = "the last step alone" if window == 1 else f"mean of the last {window} steps"
    sentence = f"The {name} is **{loss:.3f}** ({steps})"
    baseline = history.run.data.baseline_loss if history.run is not None else None
    if baseline is None:
        return f"{sentence}."
    verdict = "clearly below" if loss < 0.95 * baseline else "below" if loss < baseline else "not below"
    return f"{sentence}, {verdict} the {baseline:.3f} of {history.baseline_name}."


def _incident_table(incidents: Iterable[IncidentView]) -> str:
    rows = []
    for view in incidents:
        if view.part_of is not None:
            lost, down = "", f"part of #{view.part_of}"
        elif view.down_seconds is None:
            lost, down = "", "not recovered"
        else:
            lost, down = str(view.steps_lost), f"{view.down_seconds:.2f} s"
        restored = "" if view.part_of is not None or view.resumed_from is None else _restored_text(view.resumed_from)
        phases = ", ".join(f"{name.replace('_', ' ')} {1000 * seconds:.0f}" for name, seconds in view.phases.items())
        rows.append(
            (view.index, view.title, view.reason, ", ".join(view.hosts), view.step, lost, down, restored, phases)
        )
    return _table(_CAUSE_COLUMNS, rows, right={0, 4, 5, 6})


def _goodput_table(history: RunHistory) -> str:
    goodput = history.goodput
    whole = goodput.running_seconds or 1.0
    rows: list[tuple[object, ...]] = [
        ("**goodput: productive steps**", f"{goodput.productive_seconds:.2f}", _percent(goodput.fraction))
    ]
    rows += [
        (kind.value.replace("_", " "), f"{seconds:.2f}", _percent(seconds / whole))
        for kind, seconds in goodput.badput.items()
    ]
    rows.append(("**running time**", f"{goodput.running_seconds:.2f}", "100.0%"))
    if goodput.seconds[Kind.STOPPED]:
        rows.append(("stopped (not counted)", f"{goodput.seconds[Kind.STOPPED]:.2f}", ""))
    return _table(("kind", "seconds", "share"), rows, right={1, 2})


def _restored_text(step: int) -> str:
    return f"checkpoint {step}" if step else "init"


def _segment_table(segments: Iterable[SegmentRecord]) -> str:
    rows = [
        (
            segment.index,
            segment.incarnation,
            f"{segment.start_step} → {segment.end_step}",
            len(segment.topology.hosts),
            str(segment.topology.mesh),
            "planned resize" if segment.cause == "drained" else segment.cause.replace("_", " "),
            _restored_text(segment.restored_from.step),
            f"{segment.ended - segment.started:.2f} s",
        )
        for segment in segments
    ]
    columns = ("#", "incarnation", "steps", "hosts", "mesh", "ended by", "group restored from", "took")
    return _table(columns, rows, right={0, 1, 3, 7})


def _topology_table(history: RunHistory) -> str:
    rows: list[tuple[object, ...]] = []
    for span in history.topologies:
        plan = span.topology
        kept = "none" if span.kept_step is None else f"{span.first_step}–{span.kept_step}"
        if plan is None:
            rows.append((span.incarnation, "unknown", "", "", "", "", kept))
            continue
        batch = f"{plan.num_microbatches} × {plan.rows_per_microbatch} rows, {plan.padding_rows} padding"
        rows.append(
            (span.incarnation, ", ".join(plan.hosts), plan.mesh.num_devices, str(plan.mesh), batch, plan.remat, kept)
        )
    columns = ("incarnation", "hosts", "devices", "mesh", "batch", "rematerialization", "steps kept")
    return _table(columns, rows, right={0, 2})


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: set[int]) -> str:
    rule = [("---:" if index in right else "---") for index in range(len(columns))]
    # A cell holds messages and host names: neither may end it.
    body = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (list(columns), rule, *body))


def _shown(history: RunHistory) -> list[IncidentView]:
    return [view for view in history.incidents if view.part_of is None]


def _with_down_time(view: IncidentView) -> str:
    return view.title if view.down_seconds is None else f"{view.title}, {view.down_seconds:.1f} s"


def _name(history: RunHistory) -> str:
    return history.run.config.run_name if history.run is not None else history.location.rstrip("/").rpartition("/")[2]


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("seconds", 1.0) if seconds < 300 else ("minutes", 60.0) if seconds < 5 * 3600 else ("hours", 3600.0)


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100 * fraction:.1f}%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
