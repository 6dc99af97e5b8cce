"""The demo's transcript: its text, and its counters."""

import click
import pytest

from hive.lab.demo.transcript import WIDTH, Transcript


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return click.unstyle(capsys.readouterr().out).splitlines()


def test_the_demo_prints_chapters_with_marks(capsys: pytest.CaptureFixture[str]) -> None:
    transcript = Transcript()
    transcript.step("pods", "Two pods are added", "By the plugin.")
    transcript.check("pod-1 is added", True, "10.10.0.7")
    transcript.check("pod-2 is added", False, "refused")
    assert printed(capsys) == [
        "",
        " 1   Two pods are added",
        "     By the plugin.",
        "     ✔ pod-1 is added  10.10.0.7",
        "     ✘ pod-2 is added  refused",
    ]


def test_no_line_is_wider_than_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    transcript = Transcript()
    transcript.title("A title", "words " * 60)
    transcript.step("step", "A step", "words " * 60)
    transcript.check("something with a name of some length holds", True, "seen " * 30)
    assert max(map(len, printed(capsys))) <= WIDTH


def test_the_demo_succeeds_only_if_every_check_held() -> None:
    transcript = Transcript(quiet=True)
    assert not transcript.ok
    transcript.step("one", "One", "")
    transcript.check("first", True, "seen")
    assert transcript.ok
    assert transcript.record()["checks"] == [{"step": "one", "check": "first", "ok": True, "seen": "seen"}]
    transcript.check("second", False, "not seen")
    assert not transcript.ok


def test_an_interrupted_demo_fails(capsys: pytest.CaptureFixture[str]) -> None:
    transcript = Transcript()
    transcript.step("one", "One", "")
    transcript.check("first", True, "seen")
    transcript.fail("no clang\nits log")
    transcript.end("It works:", "It does not:")
    assert not transcript.ok
    assert transcript.record()["error"] == "no clang\nits log"
    assert any(line.startswith("✘ It does not: 1 of 1 checks held") for line in printed(capsys))


def test_a_quiet_story_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    transcript = Transcript(quiet=True)
    transcript.title("t", "e")
    transcript.step("one", "One", "e")
    transcript.show(["line"])
    transcript.check("first", False, "seen")
    transcript.end("good", "bad")
    assert printed(capsys) == []
