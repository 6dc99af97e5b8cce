"""The demo's story: its text, and its counters."""

import click
import pytest

from hive.lab.demo.story import WIDTH, Story


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return click.unstyle(capsys.readouterr().out).splitlines()


def test_the_demo_prints_chapters_with_marks(capsys: pytest.CaptureFixture[str]) -> None:
    story = Story()
    story.step("pods", "Two pods are added", "By the plugin.")
    story.check("pod-1 is added", True, "10.10.0.7")
    story.check("pod-2 is added", False, "refused")
    assert printed(capsys) == [
        "",
        " 1   Two pods are added",
        "     By the plugin.",
        "     ✔ pod-1 is added  10.10.0.7",
        "     ✘ pod-2 is added  refused",
    ]


def test_no_line_is_wider_than_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    story = Story()
    story.title("A title", "words " * 60)
    story.step("step", "A step", "words " * 60)
    story.check("something with a name of some length holds", True, "seen " * 30)
    assert max(map(len, printed(capsys))) <= WIDTH


def test_the_demo_succeeds_only_if_every_check_held() -> None:
    story = Story(quiet=True)
    assert not story.ok
    story.step("one", "One", "")
    story.check("first", True, "seen")
    assert story.ok
    assert story.account()["checks"] == [{"step": "one", "check": "first", "ok": True, "seen": "seen"}]
    story.check("second", False, "not seen")
    assert not story.ok


def test_an_interrupted_demo_fails(capsys: pytest.CaptureFixture[str]) -> None:
    story = Story()
    story.step("one", "One", "")
    story.check("first", True, "seen")
    story.fail("no clang\nits log")
    story.end("It works:", "It does not:")
    assert not story.ok
    assert story.account()["error"] == "no clang\nits log"
    assert any(line.startswith("✘ It does not: 1 of 1 checks held") for line in printed(capsys))


def test_a_quiet_story_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(quiet=True)
    story.title("t", "e")
    story.step("one", "One", "e")
    story.show(["line"])
    story.check("first", False, "seen")
    story.end("good", "bad")
    assert printed(capsys) == []
