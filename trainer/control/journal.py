"""What happened, as it happens: journal events, metrics and segments of the run directory, and whoever listens.

Written by the controller alone. Parts belong to one incarnation of one controller, so that nothing is ever appended
to an object that another process may write.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from trainer.errors import StorageError
from trainer.records import Event, JournalEvent, MetricsRecord, SegmentRecord, to_json
from trainer.store import AppendPart, Store

LOG = logging.getLogger("shoal")
E = TypeVar("E", bound=Event)
Listener = Callable[[JournalEvent | MetricsRecord], None]
# Set before the controller is made, by whoever wants to know: a terminal, a page, a dashboard.
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("shoal_journal_listeners", default=())


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Controllers made inside this block, in this context, pass all events and metrics on to `listener`.

    It is called on the controller's own thread and must not block. Blocks may be nested: every listener hears all.
    """
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


class Journal:
    """Called on the controller's event loop; each write is one small append.

    A write that fails is reported to `on_trouble` and not raised.
    """

    def __init__(self, store: Store, controller: str, *, on_trouble: Callable[[StorageError], None]) -> None:
        self._store = store
        self._controller = controller
        self._on_trouble = on_trouble
        self._listeners = list(_listeners.get())
        self._incarnation = 0
        self._events: AppendPart | None = None
        self._metrics: AppendPart | None = None
        stems = [name.removesuffix(".json") for name in store.names("segments")]
        self._next_segment = 1 + max((int(stem) for stem in stems if stem.isdecimal()), default=-1)

    def begin_incarnation(self, incarnation: int) -> None:
        """Events and metrics from now on belong to this incarnation."""
        self.close()
        self._incarnation = incarnation

    def record(self, kind: type[E], **fields: Any) -> E:
        """Append one event, stamped with both clocks, and tell the listeners."""
        event = kind(
            time=time.time(),
            monotonic=time.monotonic(),
            incarnation=self._incarnation,
            controller=self._controller,
            **fields,
        )
        with self._reporting_trouble():
            if self._events is None:
                prefix = f"journal/{self._incarnation}"
                self._events = self._store.open_part(f"{prefix}/{len(self._store.names(prefix))}.jsonl")
            self._events.append(to_json(event))
        self._tell(event)
        return event

    def record_metrics(self, metrics: tuple[MetricsRecord, ...]) -> None:
        with self._reporting_trouble():
            if self._metrics is None:
                self._metrics = self._store.open_part(f"metrics/{self._incarnation}/{metrics[0].step}.jsonl")
            self._metrics.append(b"".join(to_json(line) for line in metrics))
        for line in metrics:
            self._tell(line)

    @contextlib.contextmanager
    def _reporting_trouble(self) -> Iterator[None]:
        # Events are recorded from callbacks of connections and processes: raising there would end those instead of
        # the run, and look like a lost host.
        try:
            yield
        except StorageError as error:
            LOG.error("the journal cannot be written: %s", error)
            self._on_trouble(error)

    def _tell(self, item: Event | MetricsRecord) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(item)  # type: ignore[arg-type]  # every Event subclass is a JournalEvent
            except Exception:
                LOG.exception("a listener of the journal failed and is not called again")
                self._listeners.remove(listener)

    @property
    def next_segment(self) -> int:
        return self._next_segment

    def record_segment(self, record: SegmentRecord) -> None:
        self._store.write(f"segments/{record.index}.json", to_json(record, indent=2))
        self._next_segment = record.index + 1

    def close(self) -> None:
        for part in (self._events, self._metrics):
            if part is not None:
                part.close()
        self._events = self._metrics = None
