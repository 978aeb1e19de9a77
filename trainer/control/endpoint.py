"""How other shells talk to a living controller: a small authenticated HTTP endpoint on loopback.

GET  /hosts      list of hosts             GET /live     what `shoal status` shows of the moment
POST /capacity   {"hosts": N}
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from trainer.control.bearer import only_with
from trainer.control.runtime import ControllerFile, make_private_directory, write_private
from trainer.errors import RefusedError
from trainer.processes import identify

if TYPE_CHECKING:
    from trainer.control.controller import Controller


class CapacityRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: int = Field(ge=0)


class Endpoint:
    def __init__(self, controller: Controller, root: Path) -> None:
        self._controller = controller
        self._token = secrets.token_urlsafe(32)
        self._path = root / "controllers" / f"{controller.id}.json"
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application(middlewares=[only_with(self._token)])
        app.router.add_get("/hosts", self._hosts)
        app.router.add_get("/live", self._live)
        app.router.add_post("/capacity", self._capacity)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        controller_file = ControllerFile(
            controller=self._controller.id,
            run=self._controller.run.store.location,
            url=f"http://127.0.0.1:{port}",
            token=self._token,
            process=identify(os.getpid()),
        )
        make_private_directory(self._path.parent)  # at the last moment: a controller that leaves removes an empty one
        write_private(self._path, controller_file.model_dump_json())

    async def close(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _hosts(self, _: web.Request) -> web.Response:
        return web.json_response(self._controller.hosts())

    async def _live(self, _: web.Request) -> web.Response:
        return web.json_response(self._controller.live())

    async def _capacity(self, request: web.Request) -> web.Response:
        try:
            asked = CapacityRequest.model_validate_json(await request.read())
        except pydantic.ValidationError as error:
            return web.json_response({"error": error.errors()[0]["msg"]}, status=400)
        if (provider := self._controller.config.capacity.provider) != "local":
            return web.json_response(
                {
                    "error": f"this run follows a {provider} (capacity.provider), so its capacity is not set by hand; "
                    "continue it with capacity.provider=local to do so"
                },
                status=409,
            )
        most = self._controller.config.num_hosts.max
        if asked.hosts > most:
            return web.json_response({"error": f"{asked.hosts} hosts asked for, num_hosts.max is {most}"}, status=400)
        try:
            self._controller.offer(asked.hosts)
        except RefusedError as error:
            return web.json_response({"error": str(error)}, status=409)
        return web.json_response({"offered": asked.hosts})
