"""Constructors have no side effects: the agent is checked, built and drawn without system access."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import json, os, sys

from cells.agent import agent
from lifecycle import Hive

Hive(agent, settings={}).graph()  # imports what is imported late, reads the source for messages

OUTSIDE = (
    "open", "os.", "socket.", "subprocess.", "shutil.", "glob.", "fcntl.", "mmap.", "ctypes.", "tempfile.",
    "signal.", "pty.", "resource.", "syslog.", "urllib.", "sqlite3.",
)
touched = []


def look(event, arguments):
    if watching and event.startswith(OUTSIDE):
        frame, where = sys._getframe(1), []
        while frame is not None:
            where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        touched.append([event, repr(arguments)[:200], [one for one in where if "/cells/" in one][:3]])


watching = False
sys.addaudithook(look)
hive = Hive(agent, settings={})
watching = True
hive.check()
hive._construct()
watching = False
print(json.dumps(touched))
"""


def test_the_agent_is_checked_and_built_without_touching_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
