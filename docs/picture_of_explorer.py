"""Takes the picture of the explorer that the README shows, after `make demo`: `python docs/picture_of_explorer.py`.

Arguments such as layer=2 head=1 show another view.
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import urlencode

import torch
from playwright.sync_api import ViewportSize, sync_playwright

from varifocal.explorer.explorer import Explorer
from varifocal.explorer.opening import open_model
from varifocal.explorer.server import make_token, serve

TOP = Path(__file__).parent.parent
MODEL, BESIDE = TOP / "runs/demo", "smollm2"
SIZE: ViewportSize = {"width": 1500, "height": 1500}


def main() -> None:
    """Serve the demo's model beside the dense one, and photograph the page."""
    program = shutil.which("chromium")
    if program is None or not MODEL.is_dir():
        sys.exit("the picture needs Chromium (apt-get install chromium) and the model of `make demo`")
    torch.set_num_threads(1)
    addresses: list[str] = []
    ready = threading.Event()

    def note(address: str) -> None:
        addresses.append(address)
        ready.set()

    given = {"host": "127.0.0.1", "port": 0, "token": make_token(), "on_ready": note}
    threading.Thread(
        target=serve, args=(Explorer([open_model(one) for one in (str(MODEL), BESIDE)]),), kwargs=given, daemon=True
    ).start()
    ready.wait()
    view = {"layer": 14, "head": 0, "layer.2": 14, "head.2": 0} | dict(part.split("=", 1) for part in sys.argv[1:])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, device_scale_factor=1.25)
        page.goto(f"{addresses[0]}#{urlencode(view)}")
        page.set_default_timeout(240_000)
        for number in range(2):
            page.locator('.panel[aria-busy="false"] .after').nth(number).wait_for()
        page.locator(".far-map").evaluate_all("maps => maps.forEach((map) => (map.hidden = true))")
        page.locator(".panels").screenshot(path=TOP / "docs/pictures/explorer.png")
        browser.close()


if __name__ == "__main__":
    main()
