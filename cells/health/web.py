"""aiohttp, imported beside the rest of the start instead of in its way.

Needs: nothing.   Gives: WebFramework, which the two servers take to start after the import.
Importing aiohttp costs some 130 ms: a worker thread does it while other hooks wait for the kernel.
"""

from __future__ import annotations

import importlib

import anyio.to_thread

from lifecycle import Hook, Lifecycle


class WebFramework:
    """Taken by whoever serves HTTP: its hook has aiohttp imported before theirs run."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        lifecycle.append(Hook("import the web framework", self._import))

    async def _import(self) -> None:
        await anyio.to_thread.run_sync(importlib.import_module, "aiohttp.web")
