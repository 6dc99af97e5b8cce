"""Shells complete the command of a hive."""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.unit.lifecycle.command.run import command

__all__ = ["command"]

COMPLETES = {
    "bash": """
        source <(heart completion bash)
        complete_line() {
            COMP_LINE="$1" COMP_POINT=${#1} COMP_WORDS=(heart) COMPREPLY=()
            _heart_complete
            printf '%s\\n' "${COMPREPLY[@]}"
        }
        compopt() { :; }
        complete_line 'heart ins'; complete_line 'heart --rhythm=o'; complete_line 'heart --ev'
    """,
    "zsh": """
        autoload -U compinit; compinit -D
        source <(heart completion zsh)
        compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -l -- "$@" }
        words=(heart ins) CURRENT=2; _heart_complete
        words=(heart --rhythm=o) CURRENT=2; _heart_complete
        words=(heart --ev) CURRENT=2; _heart_complete
    """,
    "fish": """
        heart completion fish | source
        complete -C 'heart ins'
        complete -C 'heart --rhythm=o'
        complete -C 'heart --ev'
    """,
}


@pytest.mark.parametrize("shell", list(COMPLETES))
def test_real_shells_complete_the_command(shell: str, command: Path, tmp_path: Path) -> None:
    found = shutil.which(shell)
    assert found, f"{shell} is not installed: apt-get install {shell}"
    ran = subprocess.run(
        [found, "-c", textwrap.dedent(COMPLETES[shell])],
        env={"PATH": f"{command.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    rhythm = "odd" if shell == "bash" else "--rhythm=odd"  # readline has the part before = already
    assert ran.stdout.split() == ["inspect", rhythm, "--every="], ran.stderr
