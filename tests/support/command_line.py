"""Runs the ``hive`` command in a test."""

from pathlib import Path

import pytest

from hive.main import main


class Result:
    """Exit code and output of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def hive(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Result:
    """Run the command with these arguments."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return Result(code, *capsys.readouterr())
