"""Who may ask a small HTTP server of ours: whoever shows its token."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware


def shows(request: web.Request, token: str) -> bool:
    given = request.headers.get("Authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def only_with(token: str) -> Middleware:
    """Middleware that answers everybody else with 401."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not shows(request, token):
            return web.json_response({"error": "wrong or missing token"}, status=401)
        return await handler(request)

    return authenticate
