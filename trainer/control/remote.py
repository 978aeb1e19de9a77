"""Asking a living controller from another process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from trainer.control.runtime import find_controller, runtime_root
from trainer.errors import RefusedError
from trainer.store import LocalStore

_TIMEOUT_SECONDS = 10.0


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
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise RefusedError(json.loads(error.read())["error"]) from error
        except OSError as error:
            raise RefusedError(f"the controller does not answer: {error}") from error
