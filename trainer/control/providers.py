"""Where the number of hosts on offer comes from, if not from a person: a recorded trace, or a program that is asked.

A provider knows neither pool nor run: whoever follows one gives it a callback, clips what is offered to what they can
use, and cancels it in the end.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from trainer.config import CapacityConfig
from trainer.errors import ConfigError
from trainer.planning.trace import StepFunction, availability, parse_trace, replay
from trainer.processes import kill_process_group, tethered

# An answer is one line; whoever prints more is not answering.
_MOST_OUTPUT_BYTES = 65536
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What there is to be had at a moment."""

    hosts: int
    source: Literal["trace", "command"]
    price_per_host_hour: float | None = None
    """In the currency of whoever names it. None: unknown."""


class CapacityProvider(Protocol):
    async def follow(self, offer: Callable[[Offer], None]) -> None:
        """Call `offer` with what there is, and again at each change, until cancelled. Never raises for bad answers."""


def provider_of(
    config: CapacityConfig, *, created: float, on_trouble: Callable[[str], None]
) -> CapacityProvider | None:
    """The provider that the settings ask for, or None for `local`, where a person decides.

    Args:
        created: where a trace begins, in seconds since the epoch: a run that is continued goes on in its trace.
        on_trouble: told in a sentence when a program stops answering well, and when it does so again.

    Raises:
        ConfigError: as `check_provider`.
    """
    match config.provider:
        case "local":
            return None
        case "trace":
            return TraceProvider(load_replay(config), created=created)
        case "command":
            return CommandProvider(config, on_trouble=on_trouble)


def check_provider(config: CapacityConfig) -> None:
    """Refuse what could never offer anything.

    Raises:
        ConfigError: a trace that cannot be read or understood, or a program that is not there.
    """
    match config.provider:
        case "local":
            pass
        case "trace":
            load_replay(config)
        case "command":
            if shutil.which(config.command[0]) is None:
                raise ConfigError(f"capacity.command: there is no program {config.command[0]!r}")


def load_replay(config: CapacityConfig) -> StepFunction:
    """Raises ConfigError: the trace cannot be read, or is none."""
    assert config.trace_path is not None
    path = Path(config.trace_path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"capacity.trace_path: cannot read {config.trace_path!r}: {reason}") from error
    recorded = availability(parse_trace(text, name=f"capacity.trace_path {config.trace_path}"))
    return replay(recorded, speed=config.trace_speed, most_hosts=config.trace_hosts)


class TraceProvider:
    """Offers what was on offer when the trace was recorded. After its end the last number stays."""

    def __init__(self, replayed: StepFunction, *, created: float, clock: Callable[[], float] = time.time) -> None:
        self._replayed = replayed
        self._created = created
        self._clock = clock

    async def follow(self, offer: Callable[[Offer], None]) -> None:
        offered: int | None = None
        while True:
            now = self._clock() - self._created
            hosts = self._replayed.offered_at(now)
            if hosts != offered:
                offer(Offer(hosts=hosts, source="trace"))
                offered = hosts
            change = self._replayed.next_change_after(now)
            if change is None:
                return
            await asyncio.sleep(change - now)


class Answer(BaseModel):
    """What the program prints, as JSON."""

    # A misspelt price must not pass for no price.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    hosts: int = Field(ge=0)
    price_per_host_hour: float | None = Field(default=None, ge=0)


class _Trouble(Exception):  # noqa: N818  # not an error of this program
    def __init__(self, kind: Literal["start", "timeout", "exit", "answer"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CommandProvider:
    """Asks a program every `poll_seconds`. While it does not answer well, its last good answer stays."""

    def __init__(self, config: CapacityConfig, *, on_trouble: Callable[[str], None]) -> None:
        self._config = config
        self._on_trouble = on_trouble
        self._told: set[str] = set()
        """Kinds of trouble since the last good answer."""

    async def follow(self, offer: Callable[[Offer], None]) -> None:
        offered: Offer | None = None
        while True:
            answer = await self._ask()
            if answer is not None and (now := self._admitted(answer)) != offered:
                offer(now)
                offered = now
            await asyncio.sleep(self._config.poll_seconds)

    def _admitted(self, answer: Answer) -> Offer:
        price, limit = answer.price_per_host_hour, self._config.max_price_per_host_hour
        too_dear = price is not None and limit is not None and price > limit
        return Offer(hosts=0 if too_dear else answer.hosts, source="command", price_per_host_hour=price)

    async def _ask(self) -> Answer | None:
        try:
            answer = await _answer_of(self._config.command, self._config.command_timeout_seconds)
        except _Trouble as trouble:
            if trouble.kind not in self._told:
                self._told.add(trouble.kind)
                self._say(f"{trouble}; the last good answer stays")
            return None
        if self._told:
            self._told.clear()
            self._say(f"it answers again, {answer.hosts} hosts")
        return answer

    def _say(self, sentence: str) -> None:
        self._on_trouble(f"capacity.command {self._config.command[0]}: {sentence}")


async def _answer_of(command: Sequence[str], timeout_seconds: float) -> Answer:
    """Run the program to its end. However this is left, nothing that the program started is left with it."""
    try:
        process = await asyncio.create_subprocess_exec(
            *tethered(command, signal.SIGKILL),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise _Trouble("start", f"it cannot be started: {error.strerror}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(timeout_seconds):
            printed, complaint = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            returncode = await process.wait()
    except TimeoutError as error:
        raise _Trouble("timeout", f"no answer within {timeout_seconds:g} s (command_timeout_seconds)") from error
    finally:
        kill_process_group(process.pid)
        if process.returncode is None:
            process.kill()  # it may not have a group of its own yet
        await asyncio.shield(process.wait())
    if returncode != 0:
        # The last line is what most programs say the reason in, tracebacks above all.
        _, _, reason = complaint.strip().rpartition(b"\n")
        raise _Trouble("exit", f"it ended with {returncode}: {_shown(reason)}")
    try:
        return Answer.model_validate_json(printed)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        where = "".join(f"{part}: " for part in problem["loc"])
        raise _Trouble(
            "answer", f"it printed {_shown(printed)}, which is no answer: {where}{problem['msg']}"
        ) from error


async def _read(stream: asyncio.StreamReader) -> bytes:
    try:
        await stream.readexactly(_MOST_OUTPUT_BYTES)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise _Trouble("answer", f"it printed more than {_MOST_OUTPUT_BYTES} bytes")


def _shown(output: bytes) -> str:
    text = " ".join(output.decode(errors="replace").split())
    if not text:
        return "nothing"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
