"""Build hook: compiles the eBPF objects, C libraries and the CNI plugin into a wheel with a platform tag.

An editable install needs no compiler: there ``make`` compiles in place.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


def load(path: str) -> ModuleType:
    """The module at ``path``, without importing its package: the build has none of its dependencies."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CompileHook(BuildHookInterface[Any]):
    """Compile before the files are collected; the result runs on this architecture only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile everything; raises RuntimeError with what to install when a compiler is missing."""
        if self.target_name != "wheel" or version == "editable":
            return
        build = load("cells/datapath/build.py")
        build.compile_objects(ROOT / "cells/datapath/objects")
        build.compile_libraries()
        load("cmd/cilium-cni/build.py").compile_plugin()
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
