"""A driver of Chromium, and what tests ask of it: texts, the size of its window, colours, pictures, complaints."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

WIDE, PHONE = (1280, 900), (390, 844)
COLOURS = 128  # of a picture, which keeps it small


class Browser:
    """A driver, and what tests ask of it."""

    def __init__(self, driver: Any, pictures: str | None) -> None:
        self.driver = driver
        self._pictures = pictures

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        return self.driver.execute_script(f"return {script}")

    def texts(self, selector: str) -> list[str]:
        return list(self.run(f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)"))

    def view(self, size: tuple[int, int], scheme: str) -> None:
        """Look through a window of this size, with the colours that its user prefers."""
        media = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def picture(self, name: str) -> None:
        """Write what is seen, if somebody asked for pictures."""
        if self._pictures:
            taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            image = Image.open(BytesIO(base64.b64decode(taken["data"]))).convert("RGB").quantize(COLOURS)
            image.save(Path(self._pictures) / f"dashboard_{name}.png", optimize=True)

    def busy_s(self) -> float:
        """Return the time of a core that the page's main thread has used: scripts, style and layout."""
        self.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        found = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "TaskDuration"))

    def complaints(self) -> list[str]:
        """Return what the browser's console has of errors and warnings since it was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
