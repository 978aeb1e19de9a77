"""The runtime directory: what lives as long as processes do, not as long as runs do.

    /dev/shm/shoal-<uid>/                     0700
        controllers/<id>.json                 0600   address, token and process of a living controller
        keepers/<pool id>.json                0600   the same of a pool that outlives runs
        pools/<pool id>/<host id>/            0700   one host's memory: agent.json, token, workers' files

It is memory on purpose: a "host" of the local engine loses it together with its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pydantic
from pydantic import BaseModel, ConfigDict

from trainer.errors import StorageError
from trainer.processes import is_alive, kill_process_group
from trainer.records import ProcessIdentity
from trainer.wire import Acquire

POOL_VARIABLE = "SHOAL_POOL"
"""Names, in the environment of the flow processes of a service, the pool whose hosts they are to use."""


def pool_of(environment: Mapping[str, str] = os.environ) -> str | None:
    """The pool of the service that started this process, or None: the run brings hosts of its own."""
    return environment.get(POOL_VARIABLE)


class ControllerFile(BaseModel):
    """How another shell reaches the controller of a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    controller: str
    run: str
    url: str
    token: str
    process: ProcessIdentity


class KeeperFile(BaseModel):
    """How controllers, and other shells, reach the keeper of a pool."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pool: str
    url: str
    token: str
    process: ProcessIdentity


class AgentFile(BaseModel):
    """Who an agent is and whom it serves; written by the agent itself, so it exists only once the agent runs.

    In a pool that outlives runs, `run` is empty and `controller` is the pool's id.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    host_id: str
    run: str
    controller: str
    process: ProcessIdentity
    process_group: int
    url: str
    let_to: Acquire | None = None
    """The tenancy that the host is in, if it is a pool's."""


def runtime_root() -> Path:
    """The runtime directory, created if needed.

    Raises:
        StorageError: it exists but belongs to somebody else or is open to others.
    """
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    root = base / f"shoal-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(f"{root} must be a directory of yours with mode 0700; remove it or mend its mode")
    return root


def write_private(path: Path, text: str) -> None:
    """Write a 0600 file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def make_private_directory(path: Path) -> Path:
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):  # a controller that leaves may tidy up a parent under our hands
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return path
    raise StorageError(f"cannot create {path}: its parent keeps vanishing")


def tidy(root: Path) -> None:
    """Remove the directories that nobody uses any more, the runtime directory itself included."""
    for path in (root / "controllers", root / "keepers", root / "pools", root):
        with contextlib.suppress(OSError):  # not empty, or gone already
            path.rmdir()


def agent_files(root: Path) -> list[tuple[Path, AgentFile]]:
    """All host directories whose agent has introduced itself, living or dead."""
    directories = [path.parent for path in sorted(root.glob("pools/*/*/agent.json"))]
    return [(directory, agent) for directory in directories if (agent := agent_file(directory)) is not None]


def agent_file(directory: Path) -> AgentFile | None:
    """Of the agent that lives, or has lived, in this host directory. None if there was none, or of another version."""
    try:
        return AgentFile.model_validate_json((directory / "agent.json").read_bytes())
    except (FileNotFoundError, pydantic.ValidationError):
        return None


def find_controller(root: Path, run: str) -> ControllerFile | None:
    """The living controller of the run directory `run`, if it runs on this machine as this user."""
    for path in sorted(root.glob("controllers/*.json")):
        try:
            controller = ControllerFile.model_validate_json(path.read_bytes())
        except (FileNotFoundError, pydantic.ValidationError, json.JSONDecodeError):
            continue
        if controller.run == run and is_alive(controller.process):
            return controller
    return None


def keeper_path(root: Path, pool: str) -> Path:
    return root / "keepers" / f"{pool}.json"


def living_keepers(root: Path) -> list[KeeperFile]:
    """Of all pools that this user keeps on this machine."""
    found = []
    for path in sorted(root.glob("keepers/*.json")):
        try:
            keeper = KeeperFile.model_validate_json(path.read_bytes())
        except (FileNotFoundError, pydantic.ValidationError):
            continue  # ended since the listing, or of another version
        if is_alive(keeper.process):
            found.append(keeper)
    return found


def end_agents_of(root: Path, run: str, *, but_of: str) -> list[str]:
    """End the process groups of agents that served this run under another controller. Returns their host ids.

    The caller holds the run's lease, so whoever started these agents must not command them any more.
    """
    ended = []
    for directory, agent in agent_files(root):
        if agent.run == run and agent.controller != but_of:
            if is_alive(agent.process):
                kill_process_group(agent.process_group)
                ended.append(agent.host_id)
            shutil.rmtree(directory, ignore_errors=True)
    return ended


def sweep(root: Path) -> None:
    """Remove what dead processes left: controllers' and keepers' files, and host directories whose agent is gone.

    A host directory without agent.json belongs to an agent that is just starting, unless its pool's controller or
    keeper is dead too; the id of a private pool is the controller's id.
    """
    living = {keeper.pool for keeper in living_keepers(root)}
    for path in root.glob("keepers/*.json"):
        if path.stem not in living:
            path.unlink(missing_ok=True)
    for path in root.glob("controllers/*.json"):
        try:
            controller = ControllerFile.model_validate_json(path.read_bytes())
        except (FileNotFoundError, pydantic.ValidationError):
            continue
        if is_alive(controller.process):
            living.add(controller.controller)
        else:
            path.unlink(missing_ok=True)
    for pool in root.glob("pools/*"):
        if pool.name in living:
            continue
        if not any(is_alive(agent.process) for directory, agent in agent_files(root) if directory.parent == pool):
            shutil.rmtree(pool, ignore_errors=True)
