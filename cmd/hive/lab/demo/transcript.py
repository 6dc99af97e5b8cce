"""Print and record a demo: steps, explanations, and checks with ✔ or ✘; the record is data for programs."""

import sys
import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import click

from hive.output import BAD, GOOD, QUIET

WIDTH = 78
_INDENT = "     "


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its result, and what was observed."""

    step: str
    check: str
    ok: bool
    seen: str


@dataclass(slots=True)
class Transcript:
    """A narrated run. With ``quiet`` nothing is printed while it runs; the record is the same."""

    quiet: bool = False
    checks: list[Check] = field(default_factory=list)
    measured: dict[str, object] = field(default_factory=dict)
    error: str | None = None
    _steps: int = 0
    _step: str = ""
    _began: float = field(default_factory=time.monotonic)

    @property
    def ok(self) -> bool:
        """Whether there were checks, and all succeeded."""
        return self.error is None and bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def title(self, text: str, explanation: str) -> None:
        """Print the title."""
        self._print()
        self._print(click.style(text, bold=True))
        self._explain(explanation, "")

    def step(self, name: str, text: str, explanation: str) -> None:
        """Begin a step: ``name`` for the record, ``text`` and ``explanation`` for the reader."""
        self._steps += 1
        self._step = name
        self._print()
        number = click.style(f"{self._steps:2}", fg="cyan", bold=True)
        self._print(f"{number}   {click.style(text, bold=True)}")
        self._explain(explanation, _INDENT)

    def check(self, name: str, ok: bool, seen: str) -> bool:
        """Record a check, and print one line with its mark and what was observed."""
        self.checks.append(Check(self._step, name, ok, seen))
        mark = click.style(_mark(ok), fg=GOOD if ok else BAD, bold=not ok)
        colour = QUIET if ok else BAD
        if len(_INDENT) + 4 + len(name) + len(seen) <= WIDTH:
            self._print(f"{_INDENT}{mark} {name}  {click.style(seen, fg=colour)}")
        else:
            self._print(f"{_INDENT}{mark} {name}")
            for line in textwrap.wrap(seen, WIDTH - len(_INDENT) - 4):
                self._print(f"{_INDENT}    {click.style(line, fg=colour)}")
        return ok

    def show(self, lines: Iterable[str]) -> None:
        """Print text as it is."""
        for line in lines:
            self._print(f"{_INDENT}  {line}")

    def fail(self, text: str) -> None:
        """Record that the demo cannot continue."""
        self.error = text
        first, *more = text.splitlines() or [""]
        self._print(f"{_INDENT}{click.style(f'{_mark(False)} {first}', fg=BAD)}")
        for line in more:
            self._print(f"{_INDENT}  {line}")

    def end(self, good: str, bad: str) -> None:
        """Print the result."""
        held = sum(check.ok for check in self.checks)
        count = f"{held} of {len(self.checks)} checks held, {self.seconds:.1f} s."
        broke_off = " It broke off." if self.error else ""
        self._print()
        text = f"{good} {count}" if self.ok else f"{bad} {count}{broke_off}"
        self._print(click.style(f"{_mark(self.ok)} {text}", fg=GOOD if self.ok else BAD, bold=True))
        self._print()

    def record(self) -> dict[str, object]:
        """Return the record."""
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "error": self.error,
            "checks": [asdict(check) for check in self.checks],
            "measured": self.measured,
        }

    def _explain(self, text: str, indent: str) -> None:
        for line in textwrap.wrap(text, WIDTH - len(indent)):
            self._print(f"{indent}{click.style(line, fg=QUIET)}")

    def _print(self, line: str = "") -> None:
        if not self.quiet:
            click.echo(line)


def _mark(ok: bool) -> str:
    mark = "✔" if ok else "✘"
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "ok" if ok else "FAILED"
    return mark
