"""Capacity that somebody else decides about: recorded traces, and real little programs that are asked.

World: no pool and no run; what is offered goes into a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pydantic
import pytest

from trainer.config import CapacityConfig
from trainer.control.providers import Answer, CapacityProvider, Offer, TraceProvider, check_provider, provider_of
from trainer.errors import ConfigError
from trainer.planning.trace import StepFunction

PATIENCE_SECONDS = 30.0


class Follower:
    """What a provider has said so far."""

    def __init__(self) -> None:
        self.offers: asyncio.Queue[Offer] = asyncio.Queue()
        self.said: asyncio.Queue[str] = asyncio.Queue()

    async def offer(self) -> Offer:
        return await asyncio.wait_for(self.offers.get(), PATIENCE_SECONDS)

    async def trouble(self) -> str:
        return await asyncio.wait_for(self.said.get(), PATIENCE_SECONDS)


@contextlib.asynccontextmanager
async def following(make: Callable[[Follower], CapacityProvider | None]) -> AsyncIterator[Follower]:
    follower = Follower()
    provider = make(follower)
    assert provider is not None
    task = asyncio.create_task(provider.follow(follower.offers.put_nowait))
    try:
        yield follower
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def asked(program: Path, **changes: Any) -> Callable[[Follower], CapacityProvider | None]:
    """A provider that asks a Python program several times a second."""
    config = command_config(program, **changes)
    return lambda follower: provider_of(config, created=0.0, on_trouble=follower.said.put_nowait)


def command_config(program: Path, **changes: Any) -> CapacityConfig:
    values = {"provider": "command", "command": (sys.executable, "-S", str(program)), "poll_seconds": 0.1}
    return CapacityConfig.model_validate(values | changes)


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts.py"
    path.write_text(text)
    return path


def printing(tmp_path: Path, answer: str) -> Path:
    """A program that prints what a file holds at the moment."""
    say(tmp_path, answer)
    return program(tmp_path, f"print(open({str(tmp_path / 'answer')!r}).read())")


def say(tmp_path: Path, answer: str) -> None:
    (tmp_path / "new").write_text(answer)
    (tmp_path / "new").rename(tmp_path / "answer")


# --- a program -------------------------------------------------------------------------------------------------------


def test_what_a_program_prints_is_offered_when_it_changes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(asked(printing(tmp_path, '{"hosts": 3}'))) as follower:
            assert await follower.offer() == Offer(hosts=3, source="command")
            say(tmp_path, '{"hosts": 3, "price_per_host_hour": 0.25}')
            assert await follower.offer() == Offer(hosts=3, source="command", price_per_host_hour=0.25)
            say(tmp_path, '{"hosts": 0, "price_per_host_hour": null}')
            assert await follower.offer() == Offer(hosts=0, source="command")
            assert follower.said.empty()

    asyncio.run(scenario())


def test_above_the_price_limit_nothing_is_offered(tmp_path: Path) -> None:
    async def scenario() -> None:
        answer = printing(tmp_path, '{"hosts": 3, "price_per_host_hour": 2}')
        async with following(asked(answer, max_price_per_host_hour=2)) as follower:
            assert (await follower.offer()).hosts == 3
            say(tmp_path, '{"hosts": 3, "price_per_host_hour": 2.01}')
            assert await follower.offer() == Offer(hosts=0, source="command", price_per_host_hour=2.01)
            say(tmp_path, '{"hosts": 3}')
            assert (await follower.offer()).hosts == 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ("[3]", ""),
        ('{"hosts": -1}', "hosts"),
        ('{"hosts": "3"}', "hosts"),
        ('{"hosts": 2.5}', "hosts"),
        ('{"hosts": true}', "hosts"),
        ('{"hosts": 3, "price_per_host_hour": -1}', "price_per_host_hour"),
        ('{"hosts": 3, "price_per_host_hour": NaN}', "price_per_host_hour"),
        ('{"hosts": 3, "price": 1}', "price"),
        ('{"price_per_host_hour": 1}', "hosts"),
    ],
)
def test_what_is_no_number_of_hosts_at_a_price_is_no_answer(answer: str, field: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Answer.model_validate_json(answer)
    assert [problem["loc"] for problem in caught.value.errors()] == [(field,) if field else ()]


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("", ["printed nothing"]),
        ('{"hosts": 3, "price": 1}', ["which is no answer: price: Extra"]),
        ("x" * 100_000, ["more than 65536 bytes"]),
    ],
)
def test_after_a_bad_answer_the_last_good_one_stays_and_it_is_said_once(
    tmp_path: Path, answer: str, parts: list[str]
) -> None:
    async def scenario() -> None:
        async with following(asked(printing(tmp_path, '{"hosts": 3}'))) as follower:
            assert (await follower.offer()).hosts == 3
            say(tmp_path, answer)
            said = await follower.trouble()
            for part in (*parts, "the last good answer stays"):
                assert part in said
            say(tmp_path, '{"hosts": 2}')
            # Said next, however often the bad answer was given in between; and nothing was offered for it.
            assert "answers again, 2 hosts" in await follower.trouble()
            assert (await follower.offer()).hosts == 2
            assert follower.said.empty()

    asyncio.run(scenario())


def test_each_kind_of_trouble_is_said_once_until_it_is_over(tmp_path: Path) -> None:
    asks = tmp_path / "asks"
    path = program(
        tmp_path,
        f"asks = open({str(asks)!r}, 'a'); asks.write('.'); asks.close()\n"
        f"number = len(open({str(asks)!r}).read())\n"
        "assert number % 2, 'the market is closed'\n"
        "print('{\"hosts\": 1}' if number > 6 else 'soon')",
    )

    async def scenario() -> None:
        async with following(asked(path)) as follower:
            assert "printed soon" in await follower.trouble()
            assert "ended with 1: AssertionError: the market is closed" in await follower.trouble()
            assert "answers again, 1 hosts" in await follower.trouble()
            assert len(asks.read_text()) == 7
            assert "the market is closed" in await follower.trouble()

    asyncio.run(scenario())


def test_a_program_that_takes_too_long_is_killed_with_all_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    path = program(
        tmp_path,
        "import subprocess, sys, os\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        "child.wait()",
    )

    async def scenario() -> None:
        async with following(asked(path, command_timeout_seconds=3.0)) as follower:
            assert "no answer within 3 s" in await follower.trouble()
            first = [int(pid) for pid in pids.read_text().split()[:2]]
            assert len(first) == 2
            await gone(first)
            assert follower.offers.empty()
            path.write_text("print('{\"hosts\": 1}')")
            assert "answers again" in await follower.trouble()

    asyncio.run(scenario())


@pytest.mark.parametrize("ending", ["answers", "is given up"])
def test_nothing_that_a_program_started_outlives_the_question(tmp_path: Path, ending: str) -> None:
    """Neither when it answers and leaves something behind, nor when the run ends while it is being asked."""
    pids = tmp_path / "pids"
    path = program(
        tmp_path,
        "import subprocess, sys, os\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], stdout=2)\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        + ("os.close(2)\nprint('{\"hosts\": 1}')" if ending == "answers" else "child.wait()"),
    )
    if ending == "answers":  # the child must not hold the pipes, or the answer would never end
        path.write_text(path.read_text().replace("stdout=2", "stdout=-3, stderr=-3"))

    async def scenario() -> None:
        async with following(asked(path, poll_seconds=600.0)) as follower:
            if ending == "answers":
                assert (await follower.offer()).hosts == 1
            else:
                while not pids.exists() or len(pids.read_text().split()) < 2:
                    await asyncio.sleep(0.01)
        await gone([int(pid) for pid in pids.read_text().split()])

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


async def gone(pids: list[int]) -> None:
    """Killed processes take a moment to be reaped by init."""

    def living() -> list[int]:
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    async with asyncio.timeout(PATIENCE_SECONDS):
        while living():
            await asyncio.sleep(0.01)


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity\.command: there is no program '/no/such/program'"):
        check_provider(CapacityConfig(provider="command", command=("/no/such/program",)))
    check_provider(command_config(tmp_path))


def test_one_that_vanishes_later_is_trouble_and_no_error(tmp_path: Path) -> None:
    vanished = tmp_path / "vanished"

    async def scenario() -> None:
        config = CapacityConfig(provider="command", command=(str(vanished),), poll_seconds=0.1)
        async with following(lambda f: provider_of(config, created=0.0, on_trouble=f.said.put_nowait)) as follower:
            assert f"{vanished}: it ended with 1: FileNotFoundError" in await follower.trouble()
            vanished.write_text("#!/bin/sh\necho '{\"hosts\": 2}'\n")
            os.chmod(vanished, 0o700)
            assert (await follower.offer()).hosts == 2

    asyncio.run(scenario())


# --- a trace ---------------------------------------------------------------------------------------------------------


def test_a_trace_goes_on_where_the_run_is_in_it(tmp_path: Path) -> None:
    replayed = StepFunction((0.0, 100.0, 100.2, 100.3), (4, 3, 0, 2))

    async def scenario() -> None:
        start = asyncio.get_running_loop().time()

        def clock() -> float:
            return 1_000_150.0 + asyncio.get_running_loop().time() - start

        offers: list[Offer] = []
        # Created 99.9 s ago: it hears the number of that moment, each change, and then the trace is over.
        provider = TraceProvider(replayed, created=1_000_050.1, clock=clock)
        await asyncio.wait_for(provider.follow(offers.append), PATIENCE_SECONDS)
        assert offers[0] == Offer(hosts=4, source="trace")
        assert offers[-1].hosts == 2

        late: list[Offer] = []
        await TraceProvider(replayed, created=0.0, clock=clock).follow(late.append)
        assert late == [Offer(hosts=2, source="trace")]

    asyncio.run(scenario())


def test_a_trace_is_read_scaled_and_hurried(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text(
        "".join(f"0,add,n{n}\r\n" for n in range(8)) + "600000,remove,n0\n600000,remove,n1"
    )
    config = CapacityConfig(provider="trace", trace_path=str(tmp_path / "spot.csv"), trace_speed=6000.0, trace_hosts=4)

    async def scenario() -> None:
        async with following(
            lambda follower: provider_of(config, created=time.time(), on_trouble=follower.said.put_nowait)
        ) as follower:
            assert (await follower.offer()).hosts == 4
            assert (await follower.offer()).hosts == 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["capacity.trace_path", "cannot read", "No such file"]),
        (b"\xff\xfe", ["capacity.trace_path", "not UTF-8"]),
        (b"0,add,a\n1,add\n", ["capacity.trace_path", "line 2"]),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, parts: list[str]) -> None:
    if content is not None:
        (tmp_path / "spot.csv").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_provider(CapacityConfig(provider="trace", trace_path=str(tmp_path / "spot.csv")))
    for part in (*parts, "spot.csv"):
        assert part in str(caught.value)


def test_a_local_pool_has_no_provider() -> None:
    check_provider(CapacityConfig())
    assert provider_of(CapacityConfig(), created=0.0, on_trouble=print) is None
