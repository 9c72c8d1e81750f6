"""Serves the page to this machine's browser until interrupted."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from varifocal.explorer.app import make_app
from varifocal.explorer.explorer import Explorer

LEAST_TOKEN = 16
"""The fewest characters of a token that cannot be guessed."""


def make_token(given: str | None = None) -> str:
    """The secret part of the address: a new random one, or the given one if it is long enough."""
    if given is None:
        return secrets.token_urlsafe(24)
    if len(given) < LEAST_TOKEN or not re.fullmatch(r"[A-Za-z0-9_-]+", given):
        raise ValueError(
            f"a token needs at least {LEAST_TOKEN} letters, digits, - or _, got {len(given)} characters; "
            "leave it out for a random one"
        )
    return given


class Server(uvicorn.Server):
    """Lets the questions that are being answered know that it ends."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self.ending = ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ending.set()
        super().handle_exit(sig, frame)


def serve(
    explorer: Explorer, *, host: str, port: int, token: str, on_ready: Callable[[str], None] = lambda address: None
) -> None:
    """Answer until interrupted.

    Args:
        explorer: answers the questions of the page.
        host: the address to listen on.
        port: the port; 0 takes any free one.
        token: the secret part of the address.
        on_ready: called with the page's address as soon as it can be opened.
    """
    listening = listen(host, port)
    port = listening.getsockname()[1]
    ending = asyncio.Event()
    config = uvicorn.Config(
        make_app(explorer, token=token, host=host, ending=ending),
        log_level="warning",
        # Addresses contain the token, so they must not be logged.
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/{token}/")
    Server(config, ending).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ValueError if the host or port is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(128)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose others with --host and --port "
            "(0 for any free port)"
        ) from error
    return listening
