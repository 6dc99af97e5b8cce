"""``python -m lifecycle`` with hives of any package: checks, views, golden graphs, and exit codes for CI."""

import json
from pathlib import Path

import pytest

from lifecycle.command.any_hive import run

HERE = "tests.unit.lifecycle.command.examples"


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(words, {})
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_cell_a_hive_and_a_function_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "check", f"{HERE}:till") == (
        0,
        "hive is sound: 1 constructors, 1 hooks, 0 settings given\n",
        "",
    )
    assert ran(capsys, "check", f"{HERE}:market")[1].startswith("market is sound: ")
    assert ran(capsys, "check", f"{HERE}:fixed")[0] == 0
    assert ran(capsys, "check", f"{HERE}:shop", "--token=t")[0] == 0


def test_the_wiring_is_checked_without_settings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "check", f"{HERE}:shop")
    assert (code, out) == (2, "")
    assert "token is required" in err
    assert ran(capsys, "check", f"{HERE}:shop", "--graph") == (0, "hive is sound: 2 constructors\n", "")
    assert ran(capsys, "check", f"{HERE}:broken", "--graph")[0] == 1
    assert ran(capsys, "check", f"{HERE}:shop", "--graph", "--token=t")[0] == 2


@pytest.mark.parametrize(
    ("name", "code", "kind", "lacks"),
    [("broken", 1, "missing", "bytes"), ("shop", 2, "setting", "")],
)
def test_faults_are_json_for_programs(
    name: str, code: int, kind: str, lacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = ran(capsys, "check", f"{HERE}:{name}", "--json")
    verdict = json.loads(out)
    assert (found, err, verdict["sound"]) == (code, "", False)
    assert [(one["kind"], one["lacks"]) for one in verdict["faults"]] == [(kind, lacks)]


def test_a_sound_hive_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "check", f"{HERE}:market", "--json")
    assert code == 0
    assert json.loads(out) == {
        "name": "market",
        "sound": True,
        "whole": True,
        "constructors": 1,
        "hooks": 1,
        "settings": 0,
        "faults": [],
    }


def test_views_are_shown_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hook    open the till" in ran(capsys, "inspect", f"{HERE}:market")[1]
    hooks = json.loads(ran(capsys, "inspect", f"{HERE}:market", "hooks", "--json")[1])
    assert [one["name"] for one in hooks] == ["open the till"]


def test_a_golden_graph_is_written_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = str(tmp_path / "graph.json")
    assert ran(capsys, "diff", golden, f"{HERE}:market")[0] == 2, "there is no file yet"
    assert ran(capsys, "diff", "--update", golden, f"{HERE}:market") == (0, "", "")
    assert str(Path(__file__).parent) not in Path(golden).read_text(encoding="utf-8")
    assert ran(capsys, "diff", golden, f"{HERE}:market") == (0, "No differences.\n", "")
    code, out, _ = ran(capsys, "diff", golden, f"{HERE}:shop")
    assert code == 1
    assert "  + shop\n" in out
    changes = json.loads(ran(capsys, "diff", golden, f"{HERE}:shop", "--json")[1])
    assert {"added", "removed"} <= {one["what"] for one in changes}
    before = Path(golden).stat().st_mtime_ns
    assert ran(capsys, "diff", "--update", golden, f"{HERE}:market")[0] == 0
    assert Path(golden).stat().st_mtime_ns == before, "an equal graph is not written again"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["chekc", "x:y"], "chekc: expected check, inspect, diff or shell"),
        (["check"], "check: expected a hive first"),
        (["check", HERE], "expected package.module:name"),
        (["check", f"{HERE}s:till"], "No module named"),
        (["check", f"{HERE}:tills"], f"{HERE} has no tills"),
        (["check", f"{HERE}:number"], "not int"),
        (["check", f"{HERE}:fixed", "--token=x"], "fixed has its settings already"),
        (["diff", "one.json"], "diff: expected two"),
        (["diff", "one.json", "two.json", "--quick"], "--quick: expected --json or --update"),
        (["diff", "--update", f"{HERE}:till", f"{HERE}:till"], "expected a file such as graph.json"),
        (["diff", "nowhere.json", f"{HERE}:till"], "nowhere.json: No such file or directory"),
        (["shell", f"{HERE}:till"], "name its socket with --socket=PATH"),
        (["shell", f"{HERE}:shop", "--socket=/nowhere", "--tokn=x"], "--tokn: no such setting"),
        (
            ["check", f"{HERE}:in_use"],
            "missing a required argument: 'port': expected a function ",
        ),
        (["check", f"{HERE}:later"], "not coroutine"),
    ],
)
def test_a_mistake_gets_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, *words)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


def test_what_a_module_or_a_function_raises_is_one_line_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (
        ("failing_shop", "\n\nraise OSError('the disk\\nis full')\n"),
        ("needing_shop", "import there_is_none\n"),
        ("unclosed_shop", "x = (\n"),
        ("raising_shop", "def shop():\n    raise OSError('the disk is full')\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    for name, why in (
        ("failing_shop", "its import failed: OSError: the disk is full at failing_shop.py:3; python -c "),
        (
            "needing_shop",
            "its import failed: ModuleNotFoundError: No module named 'there_is_none' at ",
        ),
        (
            "unclosed_shop",
            "its import failed: SyntaxError: '(' was never closed (unclosed_shop.py, ",
        ),
        ("raising_shop", "it raised OSError: the disk is full at raising_shop.py:2\n"),
    ):
        code, out, err = ran(capsys, "check", f"{name}:shop")
        assert (code, out) == (1, "")
        assert err.startswith(f"lifecycle: {name}:shop: {why}")
        assert err.count("\n") == 1


def test_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: python -m lifecycle COMMAND")
    assert ran(capsys)[0] == 2
