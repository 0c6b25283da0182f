"""`vit serve` as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx


class Process:
    """A running service: its address, and its log as it is written."""

    def __init__(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "vitruvian", "serve", "--port", "0", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for_url()
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self._wait_until_ready()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def _wait_for_url(self) -> str:
        for _ in range(600):
            for line in self.lines:
                if match := re.fullmatch(r"serving (http://\S+)", line):
                    return match[1]
            assert self.process.poll() is None, self.lines
            time.sleep(0.1)
        raise AssertionError(self.lines)

    def _wait_until_ready(self) -> None:
        for _ in range(600):
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.lines)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)
        self._reader.join(10)
        self.process.stderr.close()
