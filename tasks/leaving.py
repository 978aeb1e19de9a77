"""What a flow does when Prefect's runner, or the machine, tells its process to end."""

from __future__ import annotations

from typing import NoReturn

from prefect.client.orchestration import get_client
from prefect.exceptions import Abort, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import AwaitingRetry

from tasks.watching import Watcher
from trainer.control.controller import Controller
from trainer.errors import StoppedError


def leave(controller: Controller, watcher: Watcher, signal: TerminationSignal) -> NoReturn:
    """Save at a step boundary; then leave the flow run to be scheduled again, or cancelled if that was asked for.

    Only after the commit may another process be told to continue: sooner, it would begin from an older state.

    Raises:
        TerminationSignal: the flow run is being cancelled, and Prefect's engine says so.
        Abort: it is to go on; its state is set already.
    """
    controller.stop_and_save("SIGTERM")
    controller.record_end(StoppedError("its process was told to end; state saved"))
    watcher.let_go_of_state()
    with get_client(sync_client=True) as client:
        flow_run_id = flow_run.id
        state = client.read_flow_run(flow_run_id).state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            raise signal
        client.set_flow_run_state(flow_run_id, AwaitingRetry(message="Its process was told to end; state saved."))
    raise Abort("told to end; state saved")
