"""A headless Chromium, by its own protocol over two pipes: no driver, no port, no network."""

import base64
import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import debian

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60.0
_KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "PageUp": 33, "PageDown": 34, "Escape": 27, "Tab": 9}


class Browser:
    """One tab."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        self._ready = selectors.DefaultSelector()
        self._ready.register(read, selectors.EVENT_READ)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and what it answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._events.append(answer)

    def open(self, page: Path, *, width: int = 1200, dark: bool = False) -> None:
        """Load a file, as a person would see it who sets such a width and such colours."""
        self._events.clear()
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.media(dark=dark)
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next("loading"))

    def media(self, kind: str = "", *, dark: bool = False) -> None:
        """``print``, or a screen; in the colours that the person prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    def tell(self, expression: str) -> Any:
        """The value of an expression in JavaScript."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def mouse(self, x: float, y: float) -> None:
        """Move it there, in pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """A key, down and up."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def requests(self) -> list[str]:
        """Addresses of all that the page has asked for since it was opened."""
        return [event["params"]["request"]["url"] for event in self._since("Network.requestWillBeSent")]

    def complaints(self) -> list[Any]:
        """What went to the console: errors, warnings, refusals by the page's policy, exceptions."""
        kinds = ["Log.entryAdded", "Page.javascriptDialogOpening"]
        kinds += [f"Runtime.{kind}" for kind in ("consoleAPICalled", "exceptionThrown")]
        return [event["params"] for kind in kinds for event in self._since(kind)]

    def _since(self, method: str) -> list[dict[str, Any]]:
        self.call("Runtime.evaluate", expression="0")  # what was sent before it is there by now
        return [event for event in self._events if event.get("method") == method]

    def _next(self, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            if not self._ready.select(deadline - time.monotonic()):
                pytest.fail(f"Chromium did not answer within {SECONDS:.0f} s: {what}")
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium is gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile below ``folder``; installed where that can be done, else the test is skipped."""
    program = debian.program("chromium", "chromium-browser", "google-chrome", package="chromium")
    theirs_read, ours_write = os.pipe()
    ours_read, theirs_write = os.pipe()
    command = ["bash", "-c", f'exec "$@" 3<&{theirs_read} 4>&{theirs_write}', "bash", program, *FLAGS]
    env: Mapping[str, str] = {**os.environ, "HOME": str(folder)}
    with subprocess.Popen(
        [*command, f"--user-data-dir={folder}", "about:blank"], pass_fds=(theirs_read, theirs_write), env=env,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        os.close(theirs_read)
        os.close(theirs_write)
        try:
            browser = Browser(ours_write, ours_read)
            yield browser
            browser._session = ""
            browser.call("Browser.close")
            process.wait(timeout=SECONDS)
        finally:
            process.kill()
            os.close(ours_write)
            os.close(ours_read)
