"""The controller of a run: what the flow's tasks call, and what goes on between their calls.

It lives in the flow process. Everything asynchronous (agents, worker groups, lease, endpoint) runs on one event loop
in a thread of its own, so that tasks are plain blocking calls and nothing they do, nor Prefect, holds up training.
Blocking storage work runs on one storage thread, in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer import records, wire
from trainer.config import RunConfig
from trainer.control.agent_link import AgentLink
from trainer.control.catalog import Catalog
from trainer.control.commits import Commits
from trainer.control.endpoint import Endpoint
from trainer.control.engines.local import LocalEngine, measured_device_memory
from trainer.control.growth import GrowthWatch
from trainer.control.hosts import PoolHost
from trainer.control.journal import Journal, listening
from trainer.control.lease import RENEW_SECONDS, Lease
from trainer.control.pool import Pool
from trainer.control.providers import CapacityProvider, Offer, provider_of
from trainer.control.run import OpenedRun
from trainer.control.runtime import end_agents_of, make_private_directory, runtime_root, sweep, tidy
from trainer.control.tenancy import Tenancy
from trainer.control.worker_group import GroupListener, Verdict, WorkerGroup
from trainer.description import JobDescription
from trainer.errors import (
    BudgetSpentError,
    DataError,
    GroupFailedError,
    LeaseError,
    RefusedError,
    SegmentFailedError,
    StoppedError,
    StorageError,
    UserCodeError,
)
from trainer.history import RunHistory, deaths_without_progress
from trainer.planning.capacity import Capacity
from trainer.planning.policy import Hold, Situation
from trainer.planning.segment import next_boundary
from trainer.planning.topology import Refusal, TopologyPlan, plan_topology
from trainer.records import PLANNED_CAUSES, Cause, MetricsRecord, RestoredFrom, SegmentRecord

LOG = logging.getLogger("shoal")
T = TypeVar("T")

# Hosts of a pool start together. A first group waits this long for the late ones rather than resize at once.
_GATHER_SECONDS = 30.0
# A later group waits this long for hosts that are coming up: little beside a second start, should they be late.
_JOIN_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class SegmentOutcome:
    """How a segment ended. Failure is a value here; the task decides whether to raise."""

    cause: Cause
    start_step: int
    end_step: int
    progress: bool
    """Whether the run's highest committed step rose during the segment."""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class ResizeOutcome:
    incarnation: int
    restored_from: RestoredFrom
    seconds: float


@dataclass
class _Disturbance:
    """From the end of one group to the first step of the next: what `Recovered` will say."""

    cause: Cause
    planned: bool
    hosts: tuple[str, ...]
    from_hosts: int
    step: int
    since: float
    """Monotonic time of the old group's last finished step."""
    phases: dict[str, float]


class Controller:
    """Use as a context manager: entering takes the lease and gets hosts, leaving ends every process of the run.

    The hosts are those of `pool`, a pool that a keeper keeps on this machine, or a private pool's. `started_by` is
    written into the lease, for others who were started by the same.

    Public methods are called from the flow's thread and block, unless they say otherwise.
    """

    def __init__(
        self, run: OpenedRun, description: JobDescription, *, pool: str | None = None, started_by: str | None = None
    ) -> None:
        self.id = f"c{uuid.uuid4().hex[:12]}"
        self.run = run
        self.config: RunConfig = run.config
        self._description = description
        self._store = run.store
        self._catalog = Catalog(run.store)
        self._lease = Lease(run.store, self.id, started_by)
        self._storage = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-storage")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-controller", daemon=True)
        self._root = runtime_root()
        self._pool_id = pool
        self._provider: CapacityProvider | None = None
        self._group: WorkerGroup | None = None
        self._last_topology: TopologyPlan | None = None
        self._disturbance: _Disturbance | None = None
        self._decided_on = Capacity()
        self._recorded_to = 0
        self._failures = 0
        self._last_failure_cause: Cause = "worker_crashed"
        self._waiting_since: float | None = None
        self._latest: MetricsRecord | None = None
        self._background: list[asyncio.Task[Any]] = []
        self._growth = GrowthWatch(self.config, on_held=self._growth_held, wake_in=self._wake_in)
        self._waking: asyncio.TimerHandle | None = None
        self._stop_reason: str | None = None
        self._fatal: Exception | None = None
        self._aborted = threading.Event()
        self._interrupted: concurrent.futures.Future[Any] | None = None
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._opened = contextlib.AsyncExitStack()
        self.holds_run = False
        """Whether a stop can be requested: the lease is ours. Before that there is nothing to stop but the waiting."""

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Controller:
        self._lease.acquire(wait_seconds=60.0, on_wait=LOG.info)
        try:
            sweep(self._root)
            end_agents_of(self._root, self._store.location, but_of=self.id)
            with listening(self._growth.observe):
                self._journal = Journal(self._store, self.id, on_trouble=self._fail)
            self._journal.begin_incarnation(self._lease.incarnation)
            self._commits = Commits(
                config=self.config.checkpoint,
                catalog=self._catalog,
                lease=self._lease,
                journal=self._journal,
                in_storage=self._in_storage,
                on_progress=self._on_progress,
                on_lease_lost=self._fail,
            )
            newest = self._catalog.commits()
            self._commits.step = newest[0].step if newest else 0
            self._raise_if_crash_loop()
            self._journal.record(
                records.RunOpened,
                resumed=self.run.resumed,
                newest_commit=newest[0].step if newest else None,
                steps=self.config.steps,
            )
            self.holds_run = True
            self._thread.start()
            try:
                self._call(self._open())
            except BaseException:
                self._shut_down()
                raise
        except BaseException:
            self._lease.release()
            raise
        return self

    def _raise_if_crash_loop(self) -> None:
        # Failures inside a run are counted while it runs. What kills this very process can only be counted by the next.
        events = RunHistory.load(self._store).events
        self._growth.learn(events)
        deaths = deaths_without_progress(events, self._commits.step or None)
        if deaths <= self.config.elastic.max_failures:
            return
        error = BudgetSpentError(
            f"the flow process died {deaths} times in a row without a newly committed step "
            f"(elastic.max_failures: {self.config.elastic.max_failures}); starting the run once more tries again",
            cause="worker_crashed",
        )
        self._journal.record(
            records.RunEnded, outcome="failed", cause="worker_crashed", step=self._commits.step, message=str(error)
        )
        self._journal.close()
        raise error

    def __exit__(self, *_: object) -> None:
        try:
            self._shut_down()
        finally:
            self._lease.release()

    def _shut_down(self) -> None:
        try:
            self._call(self._close(), interruptible=False)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._storage.shutdown()
            self._journal.close()

    async def _open(self) -> None:
        # What is opened is closed in the opposite order, also when only some of it could be opened.
        self._opened.callback(tidy, self._root)
        endpoint = Endpoint(self, self._root)
        self._pool = self._tenancy(self._pool_id) if self._pool_id is not None else self._private_pool()
        self._opened.push_async_callback(self._pool.close)
        self._opened.push_async_callback(endpoint.close)
        await endpoint.open()
        await self._pool.open()
        if self._fatal is not None:
            raise self._fatal
        self._background.append(asyncio.create_task(self._keep_lease()))
        if self._provider is not None:
            self._background.append(asyncio.create_task(self._follow(self._provider)))

    def _private_pool(self) -> Pool:
        """Hosts that begin and end with this controller."""
        engine = LocalEngine(
            self.config.engine,
            contact_timeout_seconds=self.config.elastic.contact_timeout_seconds,
            run=self._store.location,
            controller=self.id,
            pool_directory=make_private_directory(self._root / "pools" / self.id),
        )
        self._opened.callback(engine.close)
        self._provider = provider_of(
            self.config.capacity, created=self.run.record.created, on_trouble=lambda said: LOG.warning("%s", said)
        )
        return Pool(
            self.config.engine,
            engine,
            self._host_changed,
            num_hosts=self.config.num_hosts.max if self._provider is None else 0,
            contact_timeout_seconds=self.config.elastic.contact_timeout_seconds,
        )

    def _tenancy(self, pool_id: str) -> Tenancy:
        """Hosts of a pool that was there before and will be there after.

        Raises:
            RefusedError: the run wants to say itself how many hosts there are.
        """
        if (provider := self.config.capacity.provider) != "local":
            raise RefusedError(
                f"capacity.provider is {provider}, but this run's hosts are those of the service's pool: say so there "
                "(pool.capacity), or leave it local"
            )
        return Tenancy(
            self.config,
            pool=pool_id,
            run=self._store.location,
            controller=self.id,
            root=self._root,
            on_change=self._host_changed,
            on_over=self._fail,
        )

    async def _close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._waking is not None:
            self._waking.cancel()
        if self._group is not None:
            await self._end_group(self._group)
        await self._commits.settle()
        await self._opened.aclose()

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                # Not on the storage thread: reading a checkpoint back may take longer than the lease lasts.
                await asyncio.to_thread(self._lease.renew)
            except (LeaseError, StorageError) as error:
                if isinstance(error, LeaseError):
                    self._fail(error)
                    return
                # A storage that does not answer is not a lost lease yet; the next renewal decides.

    async def _follow(self, provider: CapacityProvider) -> None:
        try:
            await provider.follow(self._follow_offer)
        except Exception as error:
            self._fail(error)
            raise

    def _follow_offer(self, offer: Offer) -> None:
        hosts = min(offer.hosts, self.config.num_hosts.max)
        if hosts != self._pool.offered:
            self._change_offer(hosts, offer.source, offer.price_per_host_hour)

    def _fail(self, error: Exception) -> None:
        """Something that no retry helps: every waiting call ends with it."""
        if self._fatal is None:
            self._fatal = error
            self._stop.set()
            self._changed.set()

    # --- signals (called from signal handlers and other threads; never block) ---------------------------------------

    def request_stop(self, reason: str) -> None:
        """Stop at the next step boundary, save, and end with `StoppedError`."""

        def stop() -> None:
            if self._stop_reason is None:
                self._stop_reason = reason
                self._journal.record(records.StopRequested, reason=reason)
                self._stop.set()
                self._changed.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over already
            self._loop.call_soon_threadsafe(stop)

    def stop_and_save(self, reason: str) -> None:
        """Stop at the next step boundary and return once the state is saved, from within a call that was interrupted.

        For whoever stops the flow by an exception in its thread, as Prefect does: what the exception tore the flow's
        thread away from goes on here, and is waited for first.
        """
        self.request_stop(reason)
        self.wait_interrupted()
        with contextlib.suppress(StoppedError):
            self.situation()

    def wait_interrupted(self) -> None:
        """Return once the call that an exception tore the flow's thread away from has ended, however it ended.

        What it found out is not lost: the next call knows of failures, and the next decision is made on what is.
        """
        if self._interrupted is not None:
            concurrent.futures.wait([self._interrupted])
            self._interrupted = None  # only now: this wait may be interrupted as well

    def abort(self) -> None:
        """End everything now. Steps since the last commit are lost; nothing else is."""
        self._aborted.set()

    # --- what tasks call -------------------------------------------------------------------------------------------

    def situation(self) -> Situation:
        """What `decide` needs to know now. Without a group waits a moment for hosts that are just coming up."""
        return self._call(self._situation())

    async def _situation(self) -> Situation:
        await self._end_if_over()
        if self._living_group() is None:
            await self._gather()
        self._raise_if_over()
        capacity = self._decided_on = self._pool.capacity()
        group = self._living_group()
        plan: TopologyPlan | Refusal
        if group is not None and not self._resize_reason(group):
            plan = group.topology
        elif self._last_topology is not None and self.config.elastic.mode == "pause":
            plan = self._last_topology
        else:
            plan = self._plan(capacity if self._last_topology is None else self._growth.settled(capacity))
        waited = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        return Situation(
            step=group.step if group else self._commits.step,
            committed_step=self._commits.step,
            failures_without_progress=self._failures,
            last_failure_cause=self._last_failure_cause,
            waited_seconds=waited,
            capacity=capacity,
            plan=plan,
            last_topology=self._last_topology,
        )

    async def _gather(self) -> None:
        """Let hosts that come up together start together: a group formed on the first of them would resize at once."""
        first = self._last_topology is None
        deadline = time.monotonic() + (_GATHER_SECONDS if first else _JOIN_SECONDS)
        while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            coming = [host for host in self._pool.hosts.values() if host.state == "starting"]
            if not coming and not (first and len(self._pool.capacity().hosts) < self._pool.offered):
                return
            await self._wait_changed(left)

    def wait_for_capacity(self, *, usable: int, needed: int, reason: str, seconds: float) -> None:
        """Return when the capacity has changed, or after `seconds`."""
        self._call(self._wait_for_capacity(usable, needed, reason, seconds))

    async def _wait_for_capacity(self, usable: int, needed: int, reason: str, seconds: float) -> None:
        if self._group is not None:
            # Its hosts are leaving or lost. It must not stand at its last grant and hold them while we wait.
            await self._retire(self._group)
            await self._commits.settle()
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
            self._journal.record(records.Waiting, usable=usable, needed=needed, reason=reason)
        # Compared with what the decision to wait was made on: a change since then must not be waited for again.
        deadline = time.monotonic() + seconds
        while self._pool.capacity() == self._decided_on and (left := deadline - time.monotonic()) > 0:
            await self._wait_changed(left)
            self._raise_if_over()

    def needs_resize(self, topology: TopologyPlan) -> bool:
        """Whether `resize` has to run before a segment can train on this topology."""
        return self._call(self._needs_resize(topology))

    async def _needs_resize(self, topology: TopologyPlan) -> bool:
        group = self._living_group()
        return group is None or not group.topology.same_program(topology)

    def resize_story(self, topology: TopologyPlan) -> str:
        """For names of task runs: `4→3: host-2 lost`, `3→4: grew`, `start on 4 hosts`."""
        before, disturbance = self._last_topology, self._disturbance
        if before is None:
            return f"start on {topology.num_processes} hosts"
        if disturbance is None or disturbance.planned:
            reason = "grow" if topology.num_processes > before.num_processes else "planned"
        else:
            reason = "lost" if disturbance.cause == "host_lost" else disturbance.cause
            reason = f"{', '.join(disturbance.hosts)} {reason}"
        return f"{before.num_processes}→{topology.num_processes}: {reason}"

    def resize(self, topology: TopologyPlan) -> ResizeOutcome:
        """End the present group, form the next incarnation on `topology` and return when it is ready to step.

        Raises:
            GroupFailedError: a worker failed on the way; counts as a failure without progress.
            UserCodeError: the job failed on the way.
            StoppedError: a stop was requested.
        """
        return self._call(self._resize(topology))

    async def _resize(self, topology: TopologyPlan) -> ResizeOutcome:
        await self._end_if_over()
        previous = self._group
        if previous is not None:
            await self._retire(previous)
        started = time.monotonic()
        cause: Cause | str = self._disturbance.cause if self._disturbance else "start"
        # A group that ended has committed, or failed to commit, all it saved before the next one chooses.
        await self._commits.settle()
        self._raise_if_complete()
        if previous is not None and previous.stopped.done() and self._commits.step < previous.step:
            self._count_failure("checkpoint_error")
        commit = await self._commits.choose()
        restored_from = (
            RestoredFrom(tier="init", step=0)
            if commit is None
            else RestoredFrom(tier="checkpoint", step=commit.step, incarnation=commit.incarnation)
        )
        incarnation = self._lease.incarnation + 1
        await self._in_storage(lambda: self._lease.renew(incarnation))
        # No await from here until the group exists: a host that leaves meanwhile would not be known to be in use.
        links = self._links_to(topology.hosts)
        self._journal.begin_incarnation(incarnation)
        self._journal.record(
            records.GroupStarting,
            cause=cause,
            topology=topology,
            previous_hosts=self._last_topology.hosts if self._last_topology else (),
        )
        plan_seconds = time.monotonic() - started
        group = WorkerGroup(
            incarnation=incarnation,
            config=self.config,
            topology=topology,
            links=links,
            environment=self._pool.worker_environment,
            run_directory=self._store.location,
            restored_from=restored_from,
            restore_path=commit.path if commit else None,
            listener=GroupListener(
                on_phase=self._on_phase,
                on_steps=self._on_steps,
                on_saving=self._commits.saving,
                on_saved=self._on_saved,
                on_save_failed=lambda message: self._commits.failed(message.step, message.reason),
            ),
        )
        self._group = group
        self._recorded_to = restored_from.step
        self._last_topology = topology
        self._waiting_since = None
        if self._disturbance is not None:
            self._disturbance.phases["plan"] = plan_seconds
        boundary = self._boundary_after(restored_from.step)
        starting = asyncio.create_task(group.start(until_step=self._boundary_after(boundary)))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not starting.done():
                starting.cancel()
        if starting.cancelling() or starting.cancelled():
            # A stop before the first step: nothing is lost by ending the group at once.
            await self._end_group(group)
            self._raise_if_over()
        starting.result()
        if group.verdict.done():
            verdict = group.verdict.result()
            await self._bury(group, verdict)
            self._raise_user_error(verdict)
            self._count_failure(verdict.cause)
            raise GroupFailedError(verdict.message, cause=verdict.cause)
        self._journal.record(records.GroupReady, restored_from=restored_from)
        return ResizeOutcome(incarnation=incarnation, restored_from=restored_from, seconds=time.monotonic() - started)

    def train_segment(self, until_step: int) -> SegmentOutcome:
        """Train the living group up to `until_step`, or as far as it gets.

        Raises:
            UserCodeError: the job's own code failed; no retry helps.
        """
        return self._call(self._train_segment(until_step))

    async def _train_segment(self, until_step: int) -> SegmentOutcome:
        await self._end_if_over()
        self._raise_if_complete()
        group = self._group
        assert group is not None
        start_step, committed_before, started = self._recorded_to, self._commits.step, time.time()
        index = self._journal.next_segment
        self._journal.record(records.SegmentStarted, index=index, start_step=start_step, until_step=until_step)
        # One segment ahead, so that the group never waits for a grant while the flow is busy.
        group.grant(self._boundary_after(until_step))
        reaching = asyncio.create_task(group.wait_step(until_step))
        cause: Cause = "completed"
        try:
            while not reaching.done():
                changed = asyncio.create_task(self._wait_changed(None))
                await asyncio.wait({reaching, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if reaching.done():
                    break
                if self._stop.is_set():
                    cause = "stopped"
                elif self._resize_reason(group):
                    cause = "drained"
                else:
                    continue
                group.request_stop()
                await group.wait_ended(self.config.elastic.step_timeout_seconds)
                break
        finally:
            reaching.cancel()
        if until_step >= self.config.steps and cause == "completed" and not group.verdict.done():
            await group.wait_ended(self.config.elastic.step_timeout_seconds)
        verdict = group.verdict.result() if group.verdict.done() else None
        if verdict is not None:
            cause = verdict.cause
            await self._bury(group, verdict)
        elif group.stopped.done():
            await self._retire(group)
        if verdict is None and group.step >= self.config.steps:
            cause = "completed"  # the last step came before the stop that was asked for
        # The group is ahead of a completed segment already; what is beyond belongs to the next one.
        end_step = min(group.step, until_step) if cause == "completed" else group.step
        self._recorded_to = end_step
        # A failure is judged by what is committed; a commit that is on its way counts.
        if verdict is not None or group.stopped.done():
            await self._commits.settle()
        progress = self._commits.step > committed_before
        message = verdict.message if verdict else ""
        if verdict is None and group.stopped.done() and self._commits.step < group.step:
            # All workers stopped as they should, but what they saved is not there: those steps are lost.
            cause, message = "checkpoint_error", f"step {group.step} could not be saved: {self._commits.last_failure}"
        if cause not in PLANNED_CAUSES and not progress:
            self._count_failure(cause)
        self._journal.record(records.SegmentEnded, index=index, cause=cause, start_step=start_step, end_step=end_step)
        record = SegmentRecord(
            index=index,
            incarnation=group.incarnation,
            cause=cause,
            start_step=start_step,
            end_step=end_step,
            first_sample=start_step * self.config.global_batch_size,
            num_samples=(end_step - start_step) * self.config.global_batch_size,
            topology=group.topology,
            restored_from=group.restored_from,
            started=started,
            ended=time.time(),
        )

        def write() -> None:
            self._lease.renew()  # whoever lost the lease would write into another's numbering
            self._journal.record_segment(record)

        await self._in_storage(write)
        outcome = SegmentOutcome(
            cause=cause,
            start_step=start_step,
            end_step=end_step,
            progress=progress,
            message=message,
        )
        if verdict is not None:
            self._raise_user_error(verdict)
        return outcome

    def record_end(self, error: BaseException | None) -> None:
        """Write how the run ended, once, before the controller closes."""
        self._call(self._record_end(error), interruptible=False)

    async def _record_end(self, error: BaseException | None) -> None:
        step = self._commits.step
        match error:
            case None:
                self._journal.record(records.RunEnded, outcome="complete", cause="completed", step=step)
            case StoppedError():
                self._journal.record(
                    records.RunEnded, outcome="stopped", cause="stopped", step=step, message=str(error)
                )
            case _:
                self._journal.record(
                    records.RunEnded, outcome="failed", cause=_cause_of(error), step=step, message=str(error)
                )

    # --- what the endpoint calls (on the loop) ----------------------------------------------------------------------

    def hosts(self) -> list[dict[str, Any]]:
        """As `shoal hosts --json` prints them."""
        return [
            {
                "host_id": host.host_id,
                "state": host.state,
                "pid": host.placed.pid if host.placed else None,
                "process_group": host.placed.process_group if host.placed else None,
                "workers": sorted(host.link.worker_pids) if host.link else [],
            }
            for host in self._pool.hosts.values()
        ]

    def live(self) -> dict[str, Any]:
        """What `shoal status` adds to the run directory while the run lives."""
        group = self._living_group()
        return {
            "controller": self.id,
            "pid": os.getpid(),
            "incarnation": self._lease.incarnation,
            "step": group.step if group else self._commits.step,
            "committed_step": self._commits.step,
            "topology": group.topology.model_dump(mode="json") if group else None,
            "stepping": group is not None and group.first_step_at is not None,
            "offered": self._pool.offered,
            "usable": len(self._pool.capacity().hosts),
            "waiting": self._waiting_since is not None,
            "growth_held": self._growth.held.reason if self._growth.held else None,
            "latest": self._latest.model_dump(mode="json") if self._latest else None,
        }

    def offer(self, num_hosts: int) -> None:
        self._change_offer(num_hosts, "local", None)

    def _change_offer(self, num_hosts: int, source: str, price_per_host_hour: float | None) -> None:
        self._pool.offer(num_hosts)
        self._journal.record(
            records.CapacityChanged,
            offered=num_hosts,
            usable=len(self._pool.capacity().hosts),
            source=source,
            price_per_host_hour=price_per_host_hour,
        )
        self._pool.release_leaving(frozenset(self._group.hosts) if self._group else frozenset())
        self._changed.set()

    # --- groups ----------------------------------------------------------------------------------------------------

    def _living_group(self) -> WorkerGroup | None:
        return self._group if self._group is not None and not self._group.ended else None

    def _links_to(self, host_ids: tuple[str, ...]) -> dict[str, AgentLink]:
        usable = {host.host_id for host in self._pool.capacity().hosts}
        links = {host_id: self._pool.link(host_id) for host_id in host_ids if host_id in usable}
        if gone := [host_id for host_id in host_ids if links.get(host_id) is None]:
            # Lost or withdrawn since the plan was made: it is void. Nothing was started, so no failure is counted.
            raise GroupFailedError(f"{', '.join(gone)} left before the group started", cause="host_lost")
        return {host_id: link for host_id, link in links.items() if link is not None}

    def _plan(self, capacity: Capacity) -> TopologyPlan | Refusal:
        return plan_topology(self.config, capacity, self._description.footprint, measured_device_memory(self.config))

    def _resize_reason(self, group: WorkerGroup) -> str:
        # Until the group has made a step of its own, ending it would cost all that its start did.
        if group.first_step_at is None:
            return ""
        # In pause mode the topology never changes; a group only stops for hosts that leave.
        plan = self._plan if self.config.elastic.mode == "resize" else lambda _: group.topology
        return self._growth.resize_reason(group.topology, self._pool.capacity(), group.step, plan)

    def _growth_held(self, hold: Hold, num_hosts: int) -> None:
        until = None if hold.seconds is None else time.time() + hold.seconds
        self._journal.record(records.GrowHeld, num_hosts=num_hosts, rule=hold.rule, reason=hold.reason, until=until)

    def _wake_in(self, seconds: float) -> None:
        if self._waking is not None:
            self._waking.cancel()
        self._waking = self._loop.call_later(seconds, self._changed.set)

    async def _retire(self, group: WorkerGroup) -> None:
        """End a group by plan: stop it at a step boundary if it still runs, save, let its workers leave.

        Raises:
            UserCodeError: it had failed already, by the job's own fault.
        """
        if not group.ended:
            group.request_stop()
            await group.wait_ended(self.config.elastic.step_timeout_seconds)
        if group.verdict.done():
            verdict = group.verdict.result()
            await self._bury(group, verdict)
            self._raise_user_error(verdict)
            self._count_failure(verdict.cause)
            return
        stopped = time.monotonic()
        await self._part_with(group, await group.dismiss())
        cause: Cause = (
            "completed" if group.step >= self.config.steps else "stopped" if self._stop.is_set() else "drained"
        )
        self._journal.record(records.GroupEnded, cause=cause, step=group.step)
        if group.first_step_at is None and self._disturbance is not None:
            return  # on the way back from an earlier one, whose down time goes on
        changed = [host for host in group.hosts if (known := self._pool.hosts.get(host)) and known.state == "leaving"]
        self._disturbance = _Disturbance(
            cause=cause,
            planned=True,
            hosts=tuple(changed),
            from_hosts=len(group.hosts),
            step=group.step,
            since=group.last_step_at or stopped,
            phases={"drain": group.drain_seconds, "stop": time.monotonic() - stopped},
        )

    async def _bury(self, group: WorkerGroup, verdict: Verdict) -> None:
        """End a failed group: kill what is left of it and write the incident down."""
        started = time.monotonic()
        await self._part_with(group, await group.kill())
        stop_seconds = time.monotonic() - started
        self._journal.record(
            records.Incident,
            cause=verdict.cause,
            host_ids=verdict.host_ids,
            step=group.step,
            alive=verdict.alive,
            total=len(group.hosts),
            message=verdict.message,
            detected_seconds=verdict.detected_seconds,
            output_tail=verdict.details[-4000:],
        )
        self._journal.record(records.GroupEnded, cause=verdict.cause, step=group.step, message=verdict.message)
        # A second failure on the way back belongs to the same down time: it goes on from where it began.
        earlier = self._disturbance if group.first_step_at is None else None
        self._disturbance = _Disturbance(
            cause=earlier.cause if earlier else verdict.cause,
            planned=False,
            hosts=verdict.host_ids,
            from_hosts=earlier.from_hosts if earlier else len(group.hosts),
            step=earlier.step if earlier else group.step,
            since=earlier.since if earlier else (group.last_step_at or started),
            phases={"detect": verdict.detected_seconds, "stop": stop_seconds},
        )

    async def _end_group(self, group: WorkerGroup) -> None:
        """End a group without ceremony: the run is over or was never begun."""
        await self._part_with(group, await group.kill())

    async def _part_with(self, group: WorkerGroup, disobedient: list[str]) -> None:
        for host_id in disobedient:
            await self._pool.expel(host_id)
        group.close()
        self._group = None
        self._pool.release_leaving(frozenset())

    def _count_failure(self, cause: Cause) -> None:
        """One more failure without progress; `decide` knows how many are too many."""
        self._failures += 1
        self._last_failure_cause = cause

    def _raise_user_error(self, verdict: Verdict) -> None:
        """The job's own errors end the run: no retry helps. Does nothing for other causes."""
        match verdict.cause:
            case "user_error":
                self._fail(UserCodeError(verdict.message, details=verdict.details))
            case "data_error":
                self._fail(DataError(verdict.message, details=verdict.details))
            case _:
                return
        self._raise_if_over()

    def _boundary_after(self, step: int) -> int:
        return next_boundary(
            min(step, self.config.steps - 1), self.config.steps, self.config.checkpoint.save_interval_steps
        )

    # --- listening to the group and the pool ------------------------------------------------------------------------

    def _host_changed(self, host: PoolHost, reason: str) -> None:
        if host.state != "leaving":
            self._journal.record(records.HostChanged, host_id=host.host_id, state=host.state, reason=reason)
        self._changed.set()

    def _on_phase(self, host_id: str, process_index: int, message: wire.Phase) -> None:
        self._journal.record(
            records.WorkerPhase,
            host_id=host_id,
            process_index=process_index,
            phase=message.phase,
            seconds=message.seconds,
        )

    def _on_steps(self, metrics: tuple[MetricsRecord, ...]) -> None:
        group = self._group
        assert group is not None, "a closed group says nothing"
        first = metrics[0].step == group.restored_from.step + 1
        if first:  # before its metrics, so that a reader knows whose they are
            self._journal.record(records.FirstStep, step=metrics[0].step)
        self._journal.record_metrics(metrics)
        self._latest = metrics[-1]
        if first:
            self._close_disturbance(group)
            # Hosts that came while the group was starting were not looked at yet.
            self._changed.set()

    def _close_disturbance(self, group: WorkerGroup) -> None:
        disturbance, self._disturbance = self._disturbance, None
        if disturbance is None:
            return
        assert group.first_step_at is not None
        self._journal.record(
            records.Recovered,
            cause=disturbance.cause,
            planned=disturbance.planned,
            from_hosts=disturbance.from_hosts,
            to_hosts=len(group.hosts),
            step=disturbance.step,
            resumed_from=group.restored_from.step,
            down_seconds=group.first_step_at - disturbance.since,
            phases=disturbance.phases | group.slowest_phases(),
            hosts=disturbance.hosts,
        )

    def _on_saved(self, message: wire.Saved) -> None:
        assert self._group is not None, "a closed group says nothing"
        self._commits.saved(self._group.incarnation, message)

    def _on_progress(self) -> None:
        self._failures = 0

    # --- threads -----------------------------------------------------------------------------------------------------

    async def _wait_changed(self, seconds: float | None) -> None:
        """Return after a change of hosts or capacity since the last return, or after `seconds`.

        Cleared after the wait, never before it: a change that came while nobody waited must not be missed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    async def _end_if_over(self) -> None:
        """As `_raise_if_over`, but a group that trains on between two segments is stopped and saved first."""
        if self._stop_reason is not None and self._fatal is None and (group := self._living_group()) is not None:
            await self._retire(group)
            await self._commits.settle()
        self._raise_if_over()

    def _raise_if_complete(self) -> None:
        # A group that trains ahead may end with everything committed after the decision that is being carried out.
        if self._commits.step >= self.config.steps:
            raise GroupFailedError("every step is committed already", cause="completed")

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._stop_reason is not None and self._commits.step < self.config.steps:
            saved = (
                f"after step {self._commits.step}, state saved" if self._commits.step else "before any step was saved"
            )
            raise StoppedError(f"stopped by {self._stop_reason} {saved}; the same command continues")

    async def _in_storage(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._storage, work)

    def _call(self, work: Coroutine[Any, Any, T], *, interruptible: bool = True) -> T:
        """Run on the loop, wait here. Signal handlers run while waiting; `abort` ends the wait."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                if future.done():
                    return future.result()
                if interruptible and self._aborted.is_set():
                    future.cancel()
                    raise StoppedError(f"stopped at once; steps after {self._commits.step} are lost") from None
            except BaseException:
                if not future.done():  # raised in this thread from outside; the work itself goes on
                    self._interrupted = future
                raise


def _cause_of(error: BaseException) -> Cause:
    match error:
        case DataError():
            return "data_error"
        case UserCodeError():
            return "user_error"
        case LeaseError():
            return "lease_lost"
        case StorageError():
            return "storage_error"
        case SegmentFailedError() | BudgetSpentError():
            return error.cause  # type: ignore[return-value]  # made from a Cause
        case _:
            return "worker_crashed"
