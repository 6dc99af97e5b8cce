"""The ``hive`` command in a test: what it prints, and how it exits."""

from pathlib import Path

import pytest

from hive.main import main


class Result:
    """What a run of the command left: exit code and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def hive(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Result:
    """Run the command with these words."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return Result(code, *capsys.readouterr())
