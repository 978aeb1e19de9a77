"""A service whose Prefect server keeps its database in a real PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.multiprocess.harness import Run, wait_until
from tests.multiprocess.service import PATIENCE_SECONDS, Service

_PASSWORD = "7:sea"
_INSTALLED = [*Path("/usr/lib/postgresql").glob("*/bin"), Path(shutil.which("initdb") or "/").parent]
BINARIES = next((folder for folder in _INSTALLED if (folder / "initdb").exists()), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARIES is None, reason="there is no PostgreSQL: apt-get install postgresql"),
]


@dataclass(frozen=True)
class Postgres:
    port: int

    @property
    def database_url(self) -> str:
        """As `shoal serve` takes it."""
        return f"postgresql+asyncpg://shoal:{_PASSWORD.replace(':', '%3A')}@127.0.0.1:{self.port}/postgres"

    def query(self, sql: str) -> list[dict[str, Any]]:
        async def ask() -> list[dict[str, Any]]:
            connection = await asyncpg.connect(
                host="127.0.0.1", port=self.port, user="shoal", password=_PASSWORD, database="postgres"
            )
            try:
                return [dict(row) for row in await connection.fetch(sql)]
            finally:
                await connection.close()

        return asyncio.run(ask())

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A new cluster on a free port of loopback, which asks for a password and ends with this process."""
    assert BINARIES is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = Postgres(probe.getsockname()[1])
    # It refuses to run as root, and whoever it runs as cannot see into pytest's directories.
    user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    with tempfile.TemporaryDirectory(prefix="shoal-postgres-") as directory:
        (Path(directory) / "password").write_text(_PASSWORD)
        become = ["setpriv", "--pdeathsig=INT"]
        if os.geteuid() == 0:
            shutil.chown(directory, user)
            become += [f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]
        data = f"{directory}/data"
        options = ["--username=shoal", "--auth=scram-sha-256", f"--pwfile={directory}/password"]
        subprocess.run(
            [*become, BINARIES / "initdb", "-D", data, *options, "--no-sync", "--encoding=UTF8", "--locale=C"],
            cwd="/",
            check=True,
            stdout=subprocess.DEVNULL,
        )
        settings = {"listen_addresses": "127.0.0.1", "port": server.port, "unix_socket_directories": "", "fsync": "off"}
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *become,
                    BINARIES / "postgres",
                    "-D",
                    data,
                    *(f"--{name}={value}" for name, value in settings.items()),
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(server.answers, 60.0, lambda: (Path(directory) / "log").read_text())
            yield server
        finally:
            process.send_signal(signal.SIGINT)  # ends without waiting for its clients
            process.wait(60.0)


def test_a_service_keeps_its_flow_runs_in_postgres(
    new_run: Callable[..., Run], new_service: Callable[..., Service], postgres: Postgres, tmp_path: Path
) -> None:
    run = new_run(run_name="kept", steps=10, env={"SHOAL_TEST_ROW_SECONDS": "0.1"}, **{"num_hosts.max": 1})
    service = new_service({"kept": run}, database_url=postgres.database_url)
    service.start(run.cwd)
    flow_run = service.submit("kept")
    process = wait_until(service.flow_process, PATIENCE_SECONDS, lambda: f"a flow process: {service.output}")
    for other in (process, *service.processes("deployments.runner")):
        assert not any("postgresql" in value for value in other.environ().values()), "a job may see the password"
    service.wait_state(flow_run, "Completed")
    assert service.stop() == 0

    (row,) = postgres.query("SELECT id, name, state_name FROM flow_run")
    assert (str(row["id"]), row["name"], row["state_name"]) == (flow_run, "train kept", "Completed")
    (artifacts,) = postgres.query("SELECT count(DISTINCT key) FROM artifact")
    assert artifacts["count"] == 2
    assert list((tmp_path / "prefect-home").rglob("*.db*")) == []

    # The address may come from the environment instead, and the next service finds what this one left.
    later = new_service({"kept": run})
    later.start(run.cwd, PREFECT_SERVER_DATABASE_CONNECTION_URL=postgres.database_url)
    assert later.flow_run(flow_run)["state"]["name"] == "Completed"
    assert later.stop() == 0
    assert list((tmp_path / "prefect-home").rglob("*.db*")) == []
