"""Ctrl-C and SIGTERM while a controller runs in this process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from trainer.control.controller import Controller

# Interrupts that came before there was a controller to tell: code that is being imported may swallow the exception.
_early: list[int] = []


@contextlib.contextmanager
def remembering_interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, as always, and `raise_if_interrupted` still knows of it if nobody minded."""

    def handle(number: int, _: FrameType | None) -> None:
        _early.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _early.clear()


def raise_if_interrupted() -> None:
    if _early:
        raise KeyboardInterrupt


@contextlib.contextmanager
def stopping_on_signals(controller: Controller) -> Iterator[None]:
    """The first signal stops the run at a step boundary with its state saved, the second ends it at once.

    Enter it before the controller and leave it after, so that no signal can tear a controller that opens or closes.
    One that comes while the controller still waits for the lease raises KeyboardInterrupt: there is nothing to save.

    Does nothing outside the main thread, where Python delivers no signals, and leaves SIGTERM alone under a Prefect
    runner, which has a meaning of its own for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal seen
        if seen:
            controller.abort()
            return
        seen = True
        if not controller.holds_run:
            raise KeyboardInterrupt
        controller.request_stop(signal.Signals(number).name)

    numbers = [signal.SIGINT] if "PREFECT__FLOW_RUN_ID" in os.environ else [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored: then the terminal may go
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        raise_if_interrupted()
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
