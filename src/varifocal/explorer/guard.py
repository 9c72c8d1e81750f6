"""Guards the page: only those who know the address get in, and headers forbid the browser to load anything else."""

from __future__ import annotations

import ipaddress
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    # Allow only our own files, no inline scripts, and no frame around the page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class Guard:
    """Lets a request through if it names this server and its path begins with the token.

    A page elsewhere can make a browser ask this server under another name (DNS rebinding). The Host header then carries
    that name, and the request is refused.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        """Args:
        app: the application that is guarded.
        token: the first part of every path.
        host: the name or address that the server was started with.
        """
        self.app = app
        self.token = token
        self.host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.choose(scope)(scope, receive, send_guarded)

    def choose(self, scope: Scope) -> ASGIApp:
        """Who answers a request: the app, or a refusal."""
        host = Headers(scope=scope).get("host", "")
        if not host_is_ours(host, self.host):
            return PlainTextResponse("This server does not answer under that name.\n", status_code=421)
        _, _, path = scope["path"].partition("/")
        given, slash, _ = path.partition("/")
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return PlainTextResponse(
                "The address has no token, or a wrong one: open the address that varifocal explore printed.\n",
                status_code=403,
            )
        if not slash:
            return RedirectResponse(f"/{self.token}/")
        scope["root_path"] = f"/{self.token}"
        return self.app


def host_is_ours(header: str, host: str) -> bool:
    """Whether a Host header names this server: by a loopback name, by the host it was started with or, if it listens
    beyond loopback, by any numeric address, which cannot be a foreign name."""
    name = header.rsplit(":", 1)[0] if header.rpartition(":")[2].isdigit() else header
    name = name.lower().removeprefix("[").removesuffix("]")
    if name in ("localhost", host.lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on that host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
