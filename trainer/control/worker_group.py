"""One incarnation of the run: its workers from the order to start to their end.

The group is formed once and never mended: when any worker fails, all are killed and the next incarnation is another
object. It ends in exactly one `Ended`: stopped at a common step with everything saved, or failed with one verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainer import wire
from trainer.config import RunConfig
from trainer.control.agent_link import AgentLink
from trainer.planning.topology import TopologyPlan
from trainer.records import Cause, MetricsRecord, RestoredFrom

T = TypeVar("T")

# How long a sign that may be an echo (a collective's error, an abort inside the coordination service) waits for
# its cause. The cause of an echo is a dead process, whose end reaches us within milliseconds.
_ECHO_SECONDS = 1.0
# When one host is lost, others lost by the same cause are still coming in.
_SETTLE_SECONDS = 0.05
_KILL_SECONDS = 5.0

_CAUSE_OF_FAILURE: Mapping[str, Cause] = {
    "user": "user_error",
    "data": "data_error",
    "memory": "out_of_memory",
    "storage": "checkpoint_error",
    "system": "worker_crashed",
    "peer": "worker_crashed",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why a group failed: one cause, however many workers it took down."""

    cause: Cause
    host_ids: tuple[str, ...]
    message: str
    details: str = ""
    """Traceback or last output of the worker that failed first."""
    alive: int
    detected_seconds: float


@dataclass
class _Member:
    """One worker of the group, as far as its messages tell."""

    link: AgentLink
    process_index: int
    phases: dict[str, float] = field(default_factory=dict)
    ready: bool = False
    stopped_at: int | None = None
    failure: wire.Failed | None = None
    exit: wire.WorkerExited | None = None


@dataclass(frozen=True, kw_only=True)
class GroupListener:
    """What the controller wants to hear, called on the event loop in order."""

    on_phase: Callable[[str, int, wire.Phase], None]
    on_steps: Callable[[tuple[MetricsRecord, ...]], None]
    on_saving: Callable[[wire.Saving], None]
    on_saved: Callable[[wire.Saved], None]
    on_save_failed: Callable[[wire.SaveFailed], None]


class WorkerGroup:
    """Made by `Controller.resize`. Every method runs on the controller's event loop."""

    def __init__(
        self,
        *,
        incarnation: int,
        config: RunConfig,
        topology: TopologyPlan,
        links: Mapping[str, AgentLink],
        environment: Callable[[str], dict[str, str]],
        run_directory: str,
        restored_from: RestoredFrom,
        restore_path: str | None,
        listener: GroupListener,
    ) -> None:
        self.incarnation = incarnation
        self.topology = topology
        self.restored_from = restored_from
        self.step = restored_from.step
        """Last finished step."""
        self.first_step_at: float | None = None
        """Monotonic time of the first finished step of this group."""
        self.last_step_at: float | None = None
        self.verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The common step after which all workers stopped with everything saved."""
        self._config = config
        self._run_directory = run_directory
        self._restore_path = restore_path
        self._environment = environment
        self._listener = listener
        self._members = {
            host_id: _Member(link=links[host_id], process_index=index) for index, host_id in enumerate(topology.hosts)
        }
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rendezvous: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._step_changed = asyncio.Event()
        self._first_sign_at: float | None = None
        self._judging: asyncio.Task[None] | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._exits = asyncio.Event()
        self._sign = asyncio.Event()
        self._ending = False
        self._first_grant = restored_from.step
        self._stop_requested_at: float | None = None
        self.drain_seconds = 0.0
        """From the request to stop to the moment when all had stopped and saved."""

    # --- starting ------------------------------------------------------------------------------------------------

    async def start(self, until_step: int) -> None:
        """Order the workers and return when all are ready to step, or as soon as the verdict is known.

        The first step is granted when the last worker is ready, not before: gloo gives processes 30 s to meet
        in their first collective, and one host may compile longer than that after another.
        """
        self._first_grant = until_step
        for host_id, member in self._members.items():
            member.link.listen(self._hear)
            self._watchers.append(asyncio.create_task(self._watch_loss(member)))
            member.link.send(
                wire.StartWorker(
                    incarnation=self.incarnation,
                    assignment=wire.Assignment(
                        incarnation=self.incarnation,
                        config=self._config,
                        topology=self.topology,
                        host_id=host_id,
                        process_index=member.process_index,
                        run_directory=self._run_directory,
                        restore=self.restored_from,
                        restore_path=self._restore_path,
                    ),
                    environment=self._environment(host_id),
                )
            )
        await self._within(self._rendezvous, self._config.elastic.start_timeout_seconds, "start and rendezvous")
        await self._within(self._ready, self._config.elastic.restore_timeout_seconds, "restore and compile")

    async def _within(self, future: asyncio.Future[None], seconds: float, what: str) -> None:
        await _first({future, self.verdict}, seconds)
        if not future.done() and not self.verdict.done():
            slow = [
                host_id
                for host_id, member in self._members.items()
                if not member.ready and (future is self._ready or "rendezvous" not in member.phases)
            ]
            self._judge("worker_stuck", slow, f"{what} took longer than {seconds:.0f} s on {', '.join(slow)}")

    # --- running -------------------------------------------------------------------------------------------------

    def grant(self, until_step: int) -> None:
        self._tell_all(wire.Grant(until_step=until_step))

    def request_stop(self) -> None:
        """Ask all workers to stop after the same step and save; `stopped` or `verdict` tells how it went."""
        self._stop_requested_at = self._stop_requested_at or time.monotonic()
        self._tell_all(wire.Stop())

    async def wait_step(self, step: int) -> None:
        """Return once `step` is finished, or as soon as the group has ended."""
        while self.step < step and not self.ended:
            self._step_changed.clear()
            changed = asyncio.create_task(self._step_changed.wait())
            try:
                done = await _first({changed, self.verdict, self.stopped}, self._config.elastic.step_timeout_seconds)
            finally:
                changed.cancel()
            if not done:
                self._judge(
                    "worker_stuck",
                    list(self._members),
                    f"no step finished within {self._config.elastic.step_timeout_seconds:.0f} s after step {self.step}",
                )

    async def wait_ended(self, timeout_seconds: float) -> None:
        """Return once the group has stopped or failed; a group that does neither in time is judged stuck."""
        await _first({self.verdict, self.stopped}, timeout_seconds)
        if not self.ended:
            waiting = [host_id for host_id, member in self._members.items() if member.stopped_at is None]
            self._judge("worker_stuck", waiting, f"did not stop within {timeout_seconds:.0f} s")

    @property
    def ended(self) -> bool:
        return self.verdict.done() or self.stopped.done()

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.topology.hosts

    def slowest_phases(self) -> dict[str, float]:
        """Seconds of each start-up phase on the worker that took longest for it."""
        phases: dict[str, float] = {}
        for member in self._members.values():
            for phase, seconds in member.phases.items():
                phases[phase] = max(seconds, phases.get(phase, 0.0))
        return phases

    # --- ending --------------------------------------------------------------------------------------------------

    async def kill(self) -> list[str]:
        """SIGKILL every worker and return once their ends are known.

        Returns the hosts that did not obey in time: the caller expels them.
        """
        self._ending = True
        for member in self._members.values():
            member.link.send(wire.KillWorkers(incarnation=self.incarnation))
        return await self._wait_exits()

    async def dismiss(self) -> list[str]:
        """Let stopped workers leave in order: process 0, which serves the coordinator, goes last."""
        self._ending = True
        first, *others = self._members.values()
        for members in (others, [first]):
            for member in members:
                self._tell(member, wire.Exit())
            await self._wait_exits(members)
        return await self.kill()

    async def _wait_exits(self, members: list[_Member] | None = None) -> list[str]:
        deadline = time.monotonic() + _KILL_SECONDS
        while True:
            alive = [
                member
                for member in (members if members is not None else self._members.values())
                if member.exit is None and not member.link.lost.is_set()
            ]
            if not alive or time.monotonic() >= deadline:
                return [member.link.host_id for member in alive]
            self._exits.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._exits.wait()

    def close(self) -> None:
        """Stop listening. Whatever still comes from this incarnation is dropped."""
        for member in self._members.values():
            member.link.listen(None)
        for watcher in self._watchers:
            watcher.cancel()
        if self._judging is not None:
            self._judging.cancel()

    # --- hearing -------------------------------------------------------------------------------------------------

    def _hear(self, link: AgentLink, message: wire.FromAgentMessage) -> None:
        member = self._members[link.host_id]
        match message:
            case wire.FromWorker() if message.incarnation == self.incarnation:
                self._hear_worker(member, message.message)
            case wire.WorkerExited() if message.incarnation == self.incarnation:
                member.exit = message
                self._exits.set()
                if not self._ending:
                    self._suspect()

    def _hear_worker(self, member: _Member, message: wire.FromWorkerMessage) -> None:
        match message:
            case wire.Phase():
                member.phases[message.phase] = message.seconds
                self._listener.on_phase(member.link.host_id, member.process_index, message)
                if message.phase == "rendezvous" and all("rendezvous" in m.phases for m in self._members.values()):
                    _resolve(self._rendezvous, None)
            case wire.CoordinatorListening():
                for other in self._members.values():
                    if other is not member:
                        self._tell(other, wire.Coordinator(address=message.address))
            case wire.Ready():
                member.ready = True
                if all(m.ready for m in self._members.values()):
                    self.grant(self._first_grant)
                    _resolve(self._ready, None)
            case wire.Steps():
                self.last_step_at = time.monotonic()
                if self.first_step_at is None:
                    self.first_step_at = self.last_step_at
                self.step = message.metrics[-1].step
                self._listener.on_steps(message.metrics)
                self._step_changed.set()
            case wire.Saving() if member.process_index == 0:
                self._listener.on_saving(message)
            case wire.Saved() if member.process_index == 0:
                self._listener.on_saved(message)
            case wire.SaveFailed() if member.process_index == 0:
                self._listener.on_save_failed(message)
            case wire.Stopped():
                member.stopped_at = message.step
                if all(m.stopped_at is not None for m in self._members.values()):
                    if self._stop_requested_at is not None:
                        self.drain_seconds = time.monotonic() - self._stop_requested_at
                    _resolve(self.stopped, message.step)
            case wire.Failed():
                member.failure = member.failure or message
                self._suspect()

    async def _watch_loss(self, member: _Member) -> None:
        await member.link.lost.wait()
        self._exits.set()
        if not self._ending:
            self._suspect()

    # --- judging -------------------------------------------------------------------------------------------------

    def _suspect(self) -> None:
        self._sign.set()
        if self._judging is None and not self.ended:
            self._first_sign_at = time.monotonic()
            self._judging = asyncio.create_task(self._find_cause())

    async def _find_cause(self) -> None:
        """From the first sign to a verdict: look for a cause that is not an echo of another worker's end."""
        assert self._first_sign_at is not None
        deadline = self._first_sign_at + _ECHO_SECONDS
        while not self._has_primary_cause() and (left := deadline - time.monotonic()) > 0:
            self._sign.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._sign.wait()
        await asyncio.sleep(_SETTLE_SECONDS)
        lost = [host_id for host_id, member in self._members.items() if member.link.lost.is_set()]
        if lost:
            self._judge("host_lost", lost, f"{_names(lost)} lost")
            return
        candidates = sorted(self._members.items(), key=lambda item: _rank(item[1]))
        host_id, member = candidates[0]
        if member.failure is not None and member.failure.kind != "peer":
            self._judge(
                _CAUSE_OF_FAILURE[member.failure.kind],
                [host_id],
                f"worker on {host_id} failed in {member.failure.phase}: {member.failure.error}",
                details=member.failure.traceback,
            )
        elif member.exit is not None:
            details = member.exit.output_tail or (member.failure.traceback if member.failure else "")
            self._judge("worker_crashed", [host_id], f"worker on {host_id} {_how(member.exit)}", details=details)
        else:
            assert member.failure is not None
            self._judge(
                "worker_crashed",
                [host_id],
                f"worker on {host_id} failed in {member.failure.phase}: {member.failure.error}",
                details=member.failure.traceback,
            )

    def _has_primary_cause(self) -> bool:
        return any(_rank(member) == 0 for member in self._members.values())

    def _judge(self, cause: Cause, host_ids: list[str], message: str, details: str = "") -> None:
        now = time.monotonic()
        lost = sum(member.link.lost.is_set() for member in self._members.values())
        _resolve(
            self.verdict,
            Verdict(
                cause=cause,
                host_ids=tuple(host_ids),
                message=message,
                details=details,
                alive=len(self._members) - lost,
                detected_seconds=now - (self._first_sign_at or now),
            ),
        )

    # --- telling -------------------------------------------------------------------------------------------------

    def _tell(self, member: _Member, message: wire.ToWorkerMessage) -> None:
        member.link.send(wire.ToWorker(incarnation=self.incarnation, message=message))

    def _tell_all(self, message: wire.ToWorkerMessage) -> None:
        for member in self._members.values():
            self._tell(member, message)


def _rank(member: _Member) -> int:
    """0: a cause of its own. 1: may be an echo of another's end. 2: no sign at all."""
    if member.link.lost.is_set():
        return 0
    if member.failure is not None:
        return 1 if member.failure.kind == "peer" else 0
    if member.exit is not None:
        # JAX's coordination client aborts the process when a peer or the coordinator is gone.
        return 1 if member.exit.returncode == -signal.SIGABRT else 0
    return 2


def _how(message: wire.WorkerExited) -> str:
    if message.returncode < 0:
        return f"was ended by {signal.Signals(-message.returncode).name}"
    return f"exited with {message.returncode}"


def _names(host_ids: list[str]) -> str:
    return ", ".join(host_ids)


async def _first(futures: set[asyncio.Future[Any]], seconds: float) -> set[asyncio.Future[Any]]:
    """Those done when the first is, or none of them after `seconds`."""
    done, _ = await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return done


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)
