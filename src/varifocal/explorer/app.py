"""The page and its questions as a web application."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import ValidationError
from starlette.types import ASGIApp

import varifocal
from varifocal.explorer.explorer import Explorer
from varifocal.explorer.guard import Guard
from varifocal.explorer.views import FarView, NextView, TextQuestion, TextView, TokenQuestion, TokenView
from varifocal.explorer.waiting import AbandonedError, Waiting

FOLDER = Path(__file__).parent
MOST_REQUEST_BYTES = 2**20

Question = TypeVar("Question", bound=TextQuestion)
Answer = TypeVar("Answer")


def make_app(
    explorer: Explorer, *, token: str, host: str = "127.0.0.1", ending: asyncio.Event | None = None
) -> ASGIApp:
    """The application: all its addresses begin with `/token/`.

    Args:
        explorer: answers the questions of the page.
        token: the secret part of the address.
        host: the name or address under which the server listens.
        ending: set when the server ends; no question delays that.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"), name="static")
    templates = Environment(
        loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    # A page that finds another start at its address reloads itself: the models may have changed.
    start = secrets.token_hex(4)
    page = templates.get_template("page.html").render(
        models=explorer.models, near=explorer.near, sample=explorer.sample(), start=start, version=varifocal.__version__
    )
    # One thread computes, one question after another.
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="explorer")

    current: dict[str, Waiting] = {}

    async def computed(request: Request, answer: Callable[[Question, Waiting], Answer], asked: Question) -> Answer:
        waiting = Waiting()
        waiting.on_begin = lambda: current.update(now=waiting)
        future = asyncio.get_running_loop().run_in_executor(worker, answer, asked, waiting)
        waited_for: list[asyncio.Future[Any]] = [future, asyncio.ensure_future(disconnected(request))]
        if ending is not None:
            waited_for.append(asyncio.ensure_future(ending.wait()))
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise AbandonedError
            return future.result()
        finally:
            # The browser went on to another question, or the server ends: the thread stops at the next layer.
            waiting.leave()
            for one in waited_for:
                one.cancel()

    @app.exception_handler(ValueError)
    async def mistaken(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=422)

    @app.exception_handler(AbandonedError)
    async def abandoned(request: Request, error: AbandonedError) -> JSONResponse:
        # Nobody reads it; 499 is what servers note for a client that closed its request.
        return JSONResponse({"detail": "nobody waits for this answer"}, status_code=499)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": f"the model failed: {type(error).__name__}"}, status_code=500)

    @app.get("/")
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/api/start")
    async def show_start() -> dict[str, str]:
        return {"start": start}

    @app.get("/api/progress")
    async def show_progress() -> dict[str, int]:
        now = current.get("now")
        return {"done": now.done if now else 0, "of": now.of if now else 0}

    @app.post("/api/text")
    async def show_text(request: Request) -> TextView:
        return await computed(request, explorer.text, await asked_in(request, TextQuestion))

    @app.post("/api/token")
    async def show_token(request: Request) -> TokenView:
        return await computed(request, explorer.token, await asked_in(request, TokenQuestion))

    # What takes other readings, or every layer, has questions of its own: the page shows each answer as it comes.
    @app.post("/api/next")
    async def show_next(request: Request) -> NextView:
        return await computed(request, explorer.following, await asked_in(request, TokenQuestion))

    @app.post("/api/far")
    async def show_far(request: Request) -> FarView:
        return await computed(request, explorer.far, await asked_in(request, TokenQuestion))

    return Guard(app, token=token, host=host)


async def disconnected(request: Request) -> None:
    """Returns when the client is gone; its question must have been read to the end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def asked_in(request: Request, kind: type[Question]) -> Question:
    """The question in a request's body; answers with 413 if the body is too long, with 422 if it is not a question."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_REQUEST_BYTES:
            raise HTTPException(413, f"the request is longer than {MOST_REQUEST_BYTES:,} bytes; shorten the text")
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise HTTPException(422, sentence(error.errors(include_url=False, include_input=False))) from error


def sentence(errors: list[Any]) -> str:
    """What is wrong with a question."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"]) or "the request"
    return f"{where}: {first['msg']}"
