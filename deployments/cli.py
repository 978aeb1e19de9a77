"""The `shoal` command.

Each command imports what it needs when it runs: a bad configuration is refused, and `--help` answers, before prefect
or jax are touched.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working directory first: a user's own `tasks/` there must not shadow ours.
    sys.path.append(sys.path.pop(0))

import typer
from rich.console import Console

from trainer.config import RunConfig, load_config
from trainer.errors import LeaseError, PlanError, RefusedError, ShoalError, StorageError, UserCodeError

if TYPE_CHECKING:
    from trainer.history import RunHistory
    from trainer.store import LocalStore

app = typer.Typer(
    name="shoal",
    help="Elastic training of JAX models on capacity that comes and goes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Terminal(Console):
    """Goes on in silence when its reader has gone (`shoal train … | head`): a run outlives its terminal."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


out = Terminal(highlight=False)
err = Terminal(stderr=True, highlight=False)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML or JSON file", show_default=False)]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a config key")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="run directory", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout and nothing else")]


def main() -> NoReturn:
    """Entry point: turns what Shoal raises on purpose into one line and its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # no character that a terminal lacks may end a run
    try:
        app(standalone_mode=True)
    except UserCodeError as error:
        if error.details:
            err.print(error.details.rstrip(), markup=False, soft_wrap=True)
        fail(error)
    except ShoalError as error:
        fail(error)
    sys.exit(0)


def fail(error: ShoalError) -> NoReturn:
    for line in str(error).splitlines():
        err.print(f"shoal: {line}", markup=False, soft_wrap=True)
    sys.exit(error.exit_code)


# --- train -----------------------------------------------------------------------------------------------------------


@app.command()
def train(config: ConfigArgument, set_: SetOption = None) -> None:
    """Train a run here and now, or continue it from its newest good state.

    Exit codes: 0 complete (or already complete), 2 refused before any work, 3 user or data error, 4 failure budget or
    waiting time spent, 5 stopped by signal with state saved, 6 storage or lease trouble.
    """
    run_config = load_config(config, set_ or [])
    from trainer.control.run import completed_step
    from trainer.store import run_store

    try:
        if (step := completed_step(run_config)) is not None:
            out.print(f"run {run_config.run_name} is complete at step {step}; nothing to do")
            print_report_path(run_store(run_config.storage, run_config.run_name))
            return
        from trainer.control.signals import remembering_interrupts

        with remembering_interrupts():
            run_here(run_config)
    except KeyboardInterrupt:
        err.print("shoal: interrupted; the same command continues")
        sys.exit(5)


def run_here(config: RunConfig) -> None:
    """Run the flow in this process, with progress on this terminal."""
    from trainer.control.engines.local import measured_device_memory
    from trainer.control.journal import listening
    from trainer.control.run import check_startable
    from trainer.control.signals import raise_if_interrupted
    from trainer.description import describe_job
    from trainer.store import run_store

    store = run_store(config.storage, config.run_name)
    store.probe_parent()
    from deployments.embedded import ensure_prefect_api

    server = ensure_prefect_api()  # starts while the job is being looked at
    out.print(f"shoal: run {config.run_name} in {store.location}", markup=False, soft_wrap=True)
    check_startable(config, describe_job(config), device_memory_bytes=measured_device_memory(config))
    from prefect.exceptions import CancelledRun

    from deployments.progress import ProgressDisplay
    from flows.train import train_run

    if server is not None:
        server.wait_ready()
    raise_if_interrupted()
    try:
        with ProgressDisplay(out, config.steps) as display, listening(display):
            train_run(config)
    except CancelledRun as error:
        summarize(store)
        err.print(f"shoal: {error}", markup=False, soft_wrap=True)
        sys.exit(5)
    except LeaseError:
        raise
    except ShoalError:
        print_report_path(store)
        raise
    summarize(store)


def summarize(store: LocalStore) -> None:
    from deployments.status_view import render_status
    from trainer.history import RunHistory

    out.print()
    out.print(render_status(RunHistory.load(store)))
    print_report_path(store)


def print_report_path(store: LocalStore) -> None:
    if store.read("report/report.md") is not None:
        out.print(f"report: {store.location}/report/report.md", markup=False, soft_wrap=True)


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(metavar="SERVE_CONFIG", help="YAML file", show_default=False)],
    check: Annotated[bool, typer.Option("--check", help="only say whether the configuration is good")] = False,
) -> None:
    """Keep a Prefect server and a runner alive: runs start by schedule, from the UI, and again after a crash.

    Uses the server at PREFECT_API_URL if that is set. Ctrl-C or SIGTERM stops: every run saves at a step boundary and
    is continued by the next start.
    """
    import asyncio

    from deployments.serve import check_directory
    from deployments.serve import serve as serve_until_stopped
    from deployments.serve_config import load_serve_config, load_served_runs

    check_directory(Path.cwd())
    serve_config = load_serve_config(config)
    served = load_served_runs(config, serve_config)
    if check:
        names = ", ".join(
            ["train/train", "rollback/rollback", "evaluate/evaluate", *(f"train/{run.name}" for run, _ in served)]
        )
        out.print(f"{config}: good; deployments {names}", markup=False, soft_wrap=True)
        return
    drain_seconds = max((run.elastic.step_timeout_seconds for _, run in served), default=600.0)

    def say(line: str) -> None:
        out.print(line, markup=False, soft_wrap=True)

    asyncio.run(serve_until_stopped(config, serve_config, say, drain_seconds=drain_seconds))


# --- looking ---------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    config: ConfigArgument,
    hosts: Annotated[int | None, typer.Option("--hosts", min=1, help="healthy hosts; default num_hosts.max")] = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the topology that would be used on a number of hosts, with its memory, without using any."""
    run_config = load_config(config, set_ or [])
    from deployments.plan_view import render_plan, render_refusal
    from trainer.control.engines.local import measured_device_memory
    from trainer.description import describe_job
    from trainer.planning.capacity import Capacity
    from trainer.planning.topology import Refusal, plan_topology

    description = describe_job(run_config, with_data=False)
    capacity = Capacity.uniform(
        hosts or run_config.num_hosts.max,
        devices_per_host=run_config.engine.devices_per_host,
        hosts_per_slice=run_config.engine.hosts_per_slice,
    )
    planned = plan_topology(run_config, capacity, description.footprint, measured_device_memory(run_config))
    if isinstance(planned, Refusal):
        if json_:
            print_json({"refused": planned.model_dump(mode="json")})
        else:
            err.print(render_refusal(planned), soft_wrap=True)
        sys.exit(PlanError.exit_code)
    if json_:
        print_json(planned.model_dump(mode="json"))
    else:
        out.print(render_plan(planned, description.footprint))


@app.command()
def status(run: RunArgument, json_: JsonOption = False) -> None:
    """Show where a run is: living, finished or dead."""
    from deployments.status_view import render_status, status_json

    history, live = load_history(run)
    if json_:
        print_json(status_json(history, live))
    else:
        out.print(render_status(history, live))


@app.command()
def report(run: RunArgument) -> None:
    """Write the report of a run again, from its directory alone."""
    from trainer.report import build_report

    path = build_report(existing_run(run))
    if path is None:
        raise RefusedError(f"{run}: no step is finished yet, so there is nothing to report")
    out.print(path, markup=False, soft_wrap=True)


@app.command()
def hosts(run: RunArgument, json_: JsonOption = False) -> None:
    """List the hosts of a living run: id, state, agent's process and process group, workers."""
    from trainer.control.remote import RemoteController

    store = existing_run(run)
    remote = RemoteController.find(store)
    listed = remote.hosts() if remote is not None else orphaned_hosts(store)
    if json_:
        print_json(listed)
        return
    from rich.table import Table

    table = Table(box=None)
    for column in ("host", "state", "pid", "process group", "workers"):
        table.add_column(column)
    for host in listed:
        workers = " ".join(str(pid) for pid in host["workers"]) or "-"
        table.add_row(
            host["host_id"], host["state"], *(str(host[key] or "-") for key in ("pid", "process_group")), workers
        )
    out.print(table)
    if remote is None:
        err.print("shoal: no controller of this run lives on this machine", markup=False)


def orphaned_hosts(store: LocalStore) -> list[dict[str, Any]]:
    """Agents of a run whose controller is gone, until their contact timeout ends them."""
    import psutil

    from trainer.control.runtime import agent_files, runtime_root
    from trainer.processes import is_alive

    listed = []
    for _, agent in agent_files(runtime_root()):
        if agent.run == store.location and is_alive(agent.process):
            try:
                workers = [child.pid for child in psutil.Process(agent.process.pid).children()]
            except psutil.NoSuchProcess:
                continue
            listed.append(
                {
                    "host_id": agent.host_id,
                    "state": "orphaned",
                    "pid": agent.process.pid,
                    "process_group": agent.process_group,
                    "workers": workers,
                }
            )
    return listed


@app.command()
def capacity(
    run: RunArgument,
    hosts: Annotated[int, typer.Option("--hosts", min=0, help="hosts that the pool offers from now on")],
) -> None:
    """Change how many hosts the pool of a living run offers. The run shrinks or grows at its next step boundary."""
    from trainer.control.remote import RemoteController

    remote = RemoteController.find(existing_run(run))
    if remote is None:
        raise RefusedError(f"{run}: nobody trains this run on this machine, so there is no pool to change")
    remote.offer(hosts)
    out.print(f"the pool offers {hosts} hosts")


@app.command()
def pool(
    pool: Annotated[str | None, typer.Argument(metavar="[POOL]", help="its id; not needed if there is one")] = None,
    hosts: Annotated[int | None, typer.Option("--hosts", min=0, help="hosts that it has from now on")] = None,
    json_: JsonOption = False,
) -> None:
    """Show the pool of a service and whose its hosts are, or resize it.

    Hosts that leave end at a step boundary of the run that uses them. New ones go at once to runs that cannot train
    without; that others grow, the flow scale-up decides.
    """
    from trainer.control.remote import RemotePool

    remote = RemotePool.find(pool)
    view = remote.view() if hosts is None else remote.offer(hosts)
    if json_:
        print_json(view.model_dump(mode="json"))
        return
    from deployments.pool_view import render_pool

    out.print(render_pool(view))


@app.command()
def evaluate(
    run: RunArgument,
    step: Annotated[int | None, typer.Option("--step", min=1, help="a committed step; default the newest")] = None,
    batches: Annotated[int, typer.Option("--batches", min=1, help="of global_batch_size samples each")] = 16,
    data: Annotated[
        str | None, typer.Option("--data", help="other data; default the run's own, not trained on")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Compute the loss of a checkpoint on held-out samples.

    Reads only and needs no lease, so that it can be done while the run trains. Without --data it takes samples of the
    run's own data from beyond its last step, and says so if those run out.
    """
    store = existing_run(run)
    from trainer.control.evaluate import evaluate_run

    evaluation = evaluate_run(store, step=step, batches=batches, data_path=data)
    if json_:
        print_json(json.loads(evaluation.model_dump_json()))
    else:
        out.print(evaluation.line, markup=False, soft_wrap=True)


# --- changing --------------------------------------------------------------------------------------------------------


@app.command()
def rollback(
    run: RunArgument,
    to_step: Annotated[int, typer.Option("--to-step", min=1, help="a committed step: the run goes on from there")],
    reason: Annotated[str, typer.Option("--reason", help="kept with the run", show_default=False)] = "",
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be abandoned")] = False,
    json_: JsonOption = False,
) -> None:
    """Abandon what a run trained beyond a committed step.

    Nothing is deleted: a new line of history begins, and the same configuration trains on from that step. Refused
    while somebody trains the run. Without a terminal to ask on, --yes is needed.
    """
    store = existing_run(run)
    from trainer.control.rollback import check_not_held, plan_rollback, roll_back

    rollback_plan = plan_rollback(store, to_step)
    todo = bool(rollback_plan.abandoned_commits) and not dry_run
    if not json_:
        out.print(rollback_plan.summary(), markup=False, soft_wrap=True)
    if todo:
        check_not_held(store)
        if not yes:
            confirm("roll the run back?")
        roll_back(store, rollback_plan, reason, on_wait=lambda line: err.print(line, markup=False, soft_wrap=True))
        if not json_:
            out.print(f"rolled back; `shoal train` of the same configuration goes on from step {to_step}")
    if json_:
        print_json(
            {
                "rolled_back": todo,
                "to_step": rollback_plan.to_step,
                "from_step": rollback_plan.from_step,
                "checkpoint": rollback_plan.target.path,
                "abandoned_steps": rollback_plan.abandoned_steps,
                "abandoned_checkpoints": [commit.path for commit in rollback_plan.abandoned_commits],
            }
        )


@app.command()
def doctor(
    storage: Annotated[str, typer.Option("--storage", help="where runs are to be kept")] = "runs",
    json_: JsonOption = False,
) -> None:
    """Check Python, devices, memory, storage and ports of this machine. Exits 6 if something is missing."""
    from deployments.doctor import examine

    findings = examine(storage)
    if json_:
        print_json([finding.as_json() for finding in findings])
    else:
        for finding in findings:
            mark, style = ("ok  ", "green") if finding.ok else ("FAIL", "bold red")
            out.print(f"[{style}]{mark}[/] {finding.name}: ", end="")
            out.print(finding.text, markup=False, soft_wrap=True)
    if not all(finding.ok for finding in findings):
        sys.exit(StorageError.exit_code)


# --- helpers ---------------------------------------------------------------------------------------------------------


def existing_run(run: str) -> LocalStore:
    """Raises RefusedError if there is no run in this directory."""
    from trainer.control.run import check_is_run
    from trainer.store import open_store

    store = open_store(run)
    check_is_run(store)
    return store


def confirm(question: str) -> None:
    """Raises RefusedError unless somebody at a terminal says yes."""
    if not sys.stdin.isatty():
        raise RefusedError("there is no terminal to ask on, and nothing was done; --yes does it without asking")
    answer = err.input(f"{question} (y/N) ", markup=False, stream=sys.stdin)
    if answer.strip().lower() not in ("y", "yes"):
        raise RefusedError("not confirmed; nothing was done")


def load_history(run: str) -> tuple[RunHistory, dict[str, Any] | None]:
    import time

    from trainer.control.lease import is_held
    from trainer.control.remote import RemoteController
    from trainer.history import RunHistory

    store = existing_run(run)
    remote = RemoteController.find(store)
    history = RunHistory.load(store, living_at=time.time() if remote is not None or is_held(store) else None)
    if remote is None:
        return history, None
    said = remote.live()
    live: dict[str, Any] = {"hosts": remote.hosts(), "growth_held": said["growth_held"]}
    latest = said["latest"]
    if latest is not None:
        live |= {"step": latest["step"], "loss": latest["loss"]}
    return history, live


def print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
