"""Asking a living controller, or the keeper of a pool, from another process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from trainer import wire
from trainer.control.runtime import find_controller, living_keepers, runtime_root
from trainer.errors import RefusedError
from trainer.store import LocalStore

_TIMEOUT_SECONDS = 10.0
_NEWS_SECONDS = 40.0
"""Longer than a keeper waits for news."""


class RemoteController:
    """The controller of a run, found through the runtime directory of this machine and user."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    @classmethod
    def find(cls, store: LocalStore) -> RemoteController | None:
        """None if nobody trains this run on this machine as this user."""
        found = find_controller(runtime_root(), store.location)
        return cls(found.url, found.token) if found else None

    def hosts(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self._ask("/hosts")
        return answer

    def live(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask("/live")
        return answer

    def offer(self, num_hosts: int) -> None:
        """Raises RefusedError with the controller's reason."""
        self._ask("/capacity", {"hosts": num_hosts})

    def _ask(self, path: str, body: object = None) -> Any:
        answer = _ask("controller", self._url + path, self._token, None if body is None else json.dumps(body))
        return json.loads(answer)


class RemotePool:
    """A pool that outlives runs. Methods raise RefusedError with the keeper's reason, or if it does not answer."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    @classmethod
    def find(cls, pool: str | None = None) -> RemotePool:
        """By its id, or the only one of this machine and user.

        Raises:
            RefusedError: there is none, or several to choose from.
        """
        keepers = [keeper for keeper in living_keepers(runtime_root()) if pool in (None, keeper.pool)]
        if not keepers:
            raise RefusedError(
                "no pool is kept on this machine: `shoal serve` keeps one if its configuration has the section pool"
                if pool is None
                else f"no pool {pool} is kept on this machine"
            )
        if len(keepers) > 1:
            raise RefusedError(f"several pools are kept here, name one: {', '.join(keeper.pool for keeper in keepers)}")
        return cls(keepers[0].url, keepers[0].token)

    def view(self) -> wire.PoolView:
        return self._ask("/pool")

    def newer(self, version: int) -> wire.PoolView:
        """Once there is a newer one than `version`, or after a while the same again. Blocks for up to half a minute."""
        return self._ask(f"/pool?after={version}", seconds=_NEWS_SECONDS)

    def offer(self, num_hosts: int) -> wire.PoolView:
        return self._ask("/offer", json.dumps({"hosts": num_hosts}))

    def enlarge(self, order: wire.Enlarge) -> wire.PoolView:
        return self._ask("/enlarge", order.model_dump_json())

    def _ask(self, path: str, body: str | None = None, seconds: float = _TIMEOUT_SECONDS) -> wire.PoolView:
        answer = _ask("keeper of the pool", self._url + path, self._token, body, seconds)
        return wire.PoolView.model_validate_json(answer)


def _ask(whom: str, url: str, token: str, body: str | None, seconds: float = _TIMEOUT_SECONDS) -> bytes:
    request = urllib.request.Request(
        url, data=None if body is None else body.encode(), headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as error:
        raise RefusedError(json.loads(error.read())["error"]) from error
    except OSError as error:
        raise RefusedError(f"the {whom} does not answer: {error}") from error
