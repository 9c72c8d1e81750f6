"""A server of its own for a test, in a thread of this process, on a free port."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import uvicorn

from varifocal.explorer.app import make_app
from varifocal.explorer.explorer import Explorer
from varifocal.explorer.server import listen

TOKEN = "a-token-of-the-tests"


class Server:
    """Serves an explorer inside a `with` block; `stop` and `start` let it go away and come back."""

    def __init__(self, explorer: Explorer) -> None:
        self.app = make_app(explorer, token=TOKEN)
        self.port = 0
        self.address = ""

    def start(self) -> None:
        listening = listen("127.0.0.1", self.port)
        self.port = listening.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/{TOKEN}/"
        config = uvicorn.Config(self.app, log_level="critical", access_log=False, timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
            assert self.thread.is_alive(), "the server did not start"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=300)
        assert not self.thread.is_alive()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.thread.is_alive():
            self.stop()
