"""Compiles the CNI plugin with a test's timeouts."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path

from tests.support.machine import until_the_end

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def compiled_plugin(*options: str) -> Path:
    """Return the path of a plugin compiled with these options, such as ``-DADD_PATIENCE_MS=1000``; once per
    run.
    """
    specification = importlib.util.spec_from_file_location("plugin_build", ROOT / "cmd/cilium-cni/build.py")
    assert specification is not None
    assert specification.loader is not None
    build = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(build)
    folder = until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="cni-plugin-"))
    return Path(build.compile_plugin(Path(folder) / "cilium-cni", options=options))
