"""The modules that a start of the agent imports, as each import delays every start."""

import json
import subprocess
import sys
from typing import Final

import pytest

OURS: Final = {"cells", "hive", "lifecycle"}
OTHERS: Final = {
    *("anyio", "bitarray", "dependency_injector", "h11", "msgspec", "sniffio", "structlog"),
    "typing_extensions",
}
"""Packages of others that an agent without an API server needs."""
NOT_OURS: Final = {"colorama", "cython_runtime", "sitecustomize", "usercustomize"}
"""Imported by those where it is there, named by the compiler, or imported by the interpreter."""
DEAR: Final = {
    *(
        "argparse",
        "difflib",
        "email",
        "http.client",
        "multiprocessing",
        "pydoc",
        "shutil",
        "sqlite3",
        "unittest",
        "xml",
    ),
    *("hive.main", "hive.output", "lifecycle.graph", "lifecycle.testing"),
}
"""Modules that cost some milliseconds each, and are for other commands."""
STARTED: Final = """
import sys, json
from hive.agent.forecast import forecast
from hive.agent.process import build, sources_of
settings = ["--ipv4-range=10.200.0.0/16", "--write-cni-conf-when-ready=/run/cni.conflist"]
assert forecast(sources_of(settings, {})) is not None
hive = build(settings, {})
hive.build()
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Modules of an agent that has loaded what it will want, and built all its cells."""
    command = [sys.executable, "-X", "utf8", "-c", STARTED]
    return set(json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout))


def test_a_start_imports_no_package_that_it_does_not_need(loaded: set[str]) -> None:
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert {each for each in packages if not each.startswith("_")} - NOT_OURS == OURS | OTHERS


def test_a_start_does_not_import_what_is_for_other_commands(loaded: set[str]) -> None:
    assert loaded & DEAR == set()
