"""Prefect servers to measure: embedded as in `shoal train`, and on SQLite or PostgreSQL as in `shoal serve`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from benchmarks.common import BenchmarkError
from deployments.embedded import QUIET_SETTINGS
from deployments.serve import DATABASE_VARIABLE, PREFECT_SETTINGS
from trainer.processes import tethered

KINDS = ("embedded", "sqlite", "postgres")
TITLES = {"embedded": "embedded", "sqlite": "server on SQLite", "postgres": "server on PostgreSQL"}
# What `deployments.embedded` leaves out.
_EMBEDDED_OPTIONS = ("--no-scheduler", "--no-late-runs")
_START_SECONDS = 120.0
_STILL_SECONDS = 4.0
_MOST_STILL_SECONDS = 60.0


@dataclass(frozen=True)
class Sqlite:
    path: Path
    size_query: str = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"

    def number(self, sql: str) -> int:
        with contextlib.closing(sqlite3.connect(self.path, timeout=30.0)) as connection:
            return int(connection.execute(sql).fetchone()[0] or 0)


@dataclass(frozen=True)
class Postgres:
    port: int
    password: str
    process: psutil.Process
    size_query: str = "SELECT pg_database_size('postgres')"

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://shoal:{self.password}@127.0.0.1:{self.port}/postgres"

    def number(self, sql: str) -> int:
        async def ask() -> int:
            connection = await asyncpg.connect(
                host="127.0.0.1", port=self.port, user="shoal", password=self.password, database="postgres"
            )
            try:
                return int(await connection.fetchval(sql) or 0)
            finally:
                await connection.close()

        return asyncio.run(ask())


@dataclass(frozen=True)
class Contents:
    """What is in Prefect's database: bytes of it, rows of its largest tables, bytes of log messages."""

    size: int
    rows: Mapping[str, int]
    log_bytes: int

    def __sub__(self, other: Contents) -> Contents:
        rows = {name: count - other.rows[name] for name, count in self.rows.items()}
        return Contents(self.size - other.size, rows, self.log_bytes - other.log_bytes)


TABLES = ("task_run", "task_run_state", "events", "event_resources", "log", "artifact")


@dataclass(frozen=True)
class Server:
    api_url: str
    process: psutil.Process
    database: Sqlite | Postgres
    environment: Mapping[str, str]
    """For processes that use it."""

    def contents(self) -> Contents:
        """Once the server has written down what it was told: nothing has come for a few seconds."""
        found, since = self._contents(), time.monotonic()
        began = since
        while time.monotonic() < since + _STILL_SECONDS and time.monotonic() < began + _MOST_STILL_SECONDS:
            time.sleep(0.5)
            now = self._contents()
            if now.rows != found.rows:
                since = time.monotonic()
            found = now
        return found

    def _contents(self) -> Contents:
        number = self.database.number
        return Contents(
            size=number(self.database.size_query),
            rows={name: number(f"SELECT count(*) FROM {name}") for name in TABLES},
            log_bytes=number("SELECT sum(length(message)) FROM log"),
        )

    @property
    def pids(self) -> list[int]:
        """Of the roots of all its processes, its database's included."""
        roots = [self.process.pid]
        return [*roots, self.database.process.pid] if isinstance(self.database, Postgres) else roots


@contextlib.contextmanager
def serving(kind: str, directory: Path) -> Iterator[Server]:
    """A new server of this kind with an empty database, which ends with the block."""
    home = directory / kind
    home.mkdir()
    port = free_port()
    environment = {**os.environ, **QUIET_SETTINGS, "PREFECT_HOME": str(home)}
    environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    if kind != "embedded":
        environment |= PREFECT_SETTINGS
    options = ["--no-ui", "--log-level", "ERROR", *(_EMBEDDED_OPTIONS if kind == "embedded" else ())]
    command = [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with contextlib.ExitStack() as opened:
        database: Sqlite | Postgres = Sqlite(home / "prefect.db")
        of_server = environment
        if kind == "postgres":
            database = opened.enter_context(postgres())
            of_server = {**environment, DATABASE_VARIABLE: database.url}
        log = opened.enter_context((home / "server.log").open("wb"))
        process = subprocess.Popen(
            tethered([*command, *options], signal.SIGTERM),
            env=of_server,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        opened.callback(end, process, signal.SIGTERM)
        wait_healthy(environment["PREFECT_API_URL"], process, home / "server.log")
        yield Server(environment["PREFECT_API_URL"], psutil.Process(process.pid), database, environment)


def wait_healthy(api_url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{api_url}/health", timeout=1.0).close()
            return
        time.sleep(0.05)
    raise BenchmarkError(f"the Prefect server does not answer:\n{log.read_text()[-2000:]}")


def find_postgres() -> Path | None:
    """Where its programs are."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin"), Path(shutil.which("initdb") or "/").parent]
    return next((folder for folder in found if (folder / "initdb").exists()), None)


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A new cluster on a free port of loopback, with PostgreSQL's own settings for safety on disk."""
    binaries = find_postgres()
    assert binaries is not None
    port, password = free_port(), "sea"
    # It refuses to run as root, and whoever it runs as cannot see into a private directory of ours.
    user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as directory:
        (Path(directory) / "password").write_text(password)
        become = ["setpriv", "--pdeathsig=INT"]
        if os.geteuid() == 0:
            shutil.chown(directory, user)
            become += [f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]
        data, log = f"{directory}/data", Path(directory) / "log"
        options = ["--username=shoal", "--auth=scram-sha-256", f"--pwfile={directory}/password", "--encoding=UTF8"]
        make = [*become, str(binaries / "initdb"), "-D", data, *options, "--locale=C"]
        subprocess.run(make, cwd="/", check=True, stdout=subprocess.DEVNULL)
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": ""}
        start = [*become, str(binaries / "postgres"), "-D", data]
        start += [f"--{name}={value}" for name, value in settings.items()]
        with log.open("wb") as file:
            process = subprocess.Popen(start, cwd="/", stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchmarkError(f"PostgreSQL does not answer:\n{log.read_text()}")
                time.sleep(0.05)
            yield Postgres(port, password, psutil.Process(process.pid))
        finally:
            end(process, signal.SIGINT)  # ends without waiting for its clients


def end(process: subprocess.Popen[Any], number: signal.Signals, seconds: float = 20.0) -> None:
    """Signal it and return once it has ended, by SIGKILL if it takes longer."""
    process.send_signal(number)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
