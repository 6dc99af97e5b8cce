"""The language of scripts: pages, lines, flags of commands, expectations, sections that are tried again."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import HiveError
from lifecycle.admin.script import (
    Arguments,
    Command,
    CommandError,
    Engine,
    Flag,
    ScriptError,
    State,
    builtin,
    help_command,
    parse,
)

pytestmark = pytest.mark.anyio

NAMES = st.text(string.ascii_lowercase + "/.", min_size=1).filter(
    lambda name: not name.startswith("/") and ".." not in name.split("/")
)
TEXTS = st.lists(st.text(string.ascii_letters + " #'-", max_size=9)).map(
    lambda lines: "".join(f"{line}\n" for line in lines if not line.startswith("-- "))
)


@given(script=TEXTS, files=st.dictionaries(NAMES, TEXTS))
def test_a_page_reads_back_as_it_was_written(script: str, files: dict[str, str]) -> None:
    whole = script + "".join(f"-- {name} --\n{text}" for name, text in files.items())
    archive = parse(whole)
    assert (archive.script, archive.files, archive.text()) == (script, files, whole)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("-- a --\n-- a --\n", "line 2: the file a is there twice; give one another name"),
        ("echo\n-- ../a --\n", "line 2: the file ../a leads outside; expected a name such as a/b.yaml"),
        ("-- /etc/passwd --\n", "line 1: the file /etc/passwd leads outside"),
    ],
)
def test_an_invalid_page_is_refused(page: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse(page)


class Counter:
    """Fails until it was called so often."""

    def __init__(self) -> None:
        self.calls = 0

    async def run(self, state: State, given: Arguments) -> None:
        self.calls += 1
        await state.print(f"call {self.calls}")
        if self.calls < int(given.words[0]):
            raise CommandError(f"only {self.calls}")


async def shout(state: State, given: Arguments) -> None:
    text = " ".join(given.words)
    await state.print(text.upper() if given.flags["loud"] else text)
    await state.print(given.flags["to"])


SHOUT = Command(
    "shout",
    "Print words",
    shout,
    "word [word]",
    (
        Flag("loud", "Loudly", "switch", short="l"),
        Flag("to", "To whom", default="all", choices=("all", "one")),
    ),
)


def engine(counter: Counter | None = None, within: float = 5.0) -> Engine:
    count = Command("count", "Count calls", (counter or Counter()).run, "enough")
    found = Engine(
        [*builtin(), SHOUT, count, help_command(lambda: found.commands)],
        within=within,
    )
    return found


@pytest.mark.parametrize(
    ("synopsis", "taken", "refused"),
    [
        ("", [0], [1]),
        ("table key", [2], [1, 3]),
        ("[view] [name]", [0, 1, 2], [3]),
        ("pattern [file]", [1, 2], [0, 3]),
        ("table file...", [2, 3, 9], [1]),
        ("[name[=value]...]", [0, 1, 9], []),
        ("old new [old new]... file", [3, 5], [2]),
    ],
)
def test_a_command_takes_as_many_arguments_as_its_synopsis_has(
    synopsis: str, taken: list[int], refused: list[int]
) -> None:
    command = Command("it", "Do it", shout, synopsis)
    for count in taken:
        assert len(command.arguments(["x"] * count).words) == count
    for count in refused:
        with pytest.raises(CommandError, match=r"^usage: it"):
            command.arguments(["x"] * count)


@pytest.mark.parametrize(
    ("name", "why"),
    [("count", "there is one of this name at .*py:"), ("count all", "expected a name without blanks")],
)
def test_a_command_that_could_not_be_called_is_refused(name: str, why: str) -> None:
    with pytest.raises(HiveError, match=rf"^command '?{name}'? at .*test_language.py:\d+: {why}"):
        Engine([Command("count", "Count", shout), Command(name, "Count", shout)])


async def ran(script: str, tmp_path: Path, found: Engine | None = None) -> State:
    state = State(tmp_path)
    await (found or engine()).script(state, script, "page.txtar")
    return state


async def refused(script: str, tmp_path: Path, found: Engine | None = None) -> str:
    with pytest.raises(ScriptError) as caught:
        await ran(script, tmp_path, found)
    return str(caught.value)


async def test_a_script_line_has_words_quotes_variables_and_comments(tmp_path: Path) -> None:
    script = """\
        env who=world
        echo hello $who '$who  it''s' ${who}s # not this
    """
    assert (await ran(script, tmp_path)).stdout == "hello world $who  it's worlds\n"


async def test_flags_stand_anywhere_with_one_dash_or_two(tmp_path: Path) -> None:
    for line in ("shout -l --to=one hi", "shout hi -to one --loud", "shout --loud=true -to=one -- hi"):
        assert (await ran(line, tmp_path)).stdout == "HI\none\n"
    assert (await ran("shout -- -l", tmp_path)).stdout == "-l\nall\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("shuot hi", "shuot: no such command; did you mean shout?"),
        ("! shuot hi", "shuot: no such command; did you mean shout?"),
        ("shout", "usage: shout [--loud] [--to=...] word [word]"),
        ("shout a b c", "usage: shout [--loud] [--to=...] word [word]"),
        ("shout --lod a", "--lod: no such flag; usage: shout [--loud] [--to=...] word [word]"),
        ("shout a --to", "--to: needs a value, as in --to=VALUE"),
        ("shout a --to=two", "--to=two: expected all or one"),
        ("echo 'open", "a quote is not closed: expected another '"),
        ("** echo", "**: expected ! (fails), ? (may fail), * (until it succeeds) or !*"),
        ("!", "!: expected a command after it"),
        ("! echo", "echo: it succeeded, and was expected to fail"),
        ("cat ../../etc/passwd", "../../etc/passwd: expected a file inside the script's directory"),
        ("cat missing", "missing: no such file or directory"),
        ("sleep soon", "soon: expected a duration such as 15s, 2m0s or 100ms"),
        ("stdout '('", "(: this is not a regular expression"),
    ],
)
async def test_a_script_error_has_page_and_line(line: str, text: str, tmp_path: Path) -> None:
    message = await refused(f"echo before\n\n{line}\n", tmp_path)
    assert message.startswith("page.txtar:3: ")
    assert text in message


async def test_a_script_failure_shows_the_previous_output(tmp_path: Path) -> None:
    message = await refused("echo one\nstdout two", tmp_path)
    assert message == "page.txtar:2: stdout two\nno line of stdout matches two:\none"


async def test_failures_may_be_expected_or_not_minded(tmp_path: Path) -> None:
    script = (
        "! cat missing\nstderr 'no such file'\n? cat missing\n? echo fine\nstdout fine\nstop\ncat missing\n"
    )
    await ran(script, tmp_path)


async def test_a_section_is_run_again_until_its_last_command_succeeds(tmp_path: Path) -> None:
    counter = Counter()
    await ran(
        "# count\ncount 1\nstdout call\n* stdout 'call 4'\n# next\necho over", tmp_path, engine(counter)
    )
    assert counter.calls == 4


async def test_a_retried_section_that_never_succeeds_shows_its_last_failure(tmp_path: Path) -> None:
    message = await refused("* count 1000000", tmp_path, engine(within=0.05))
    assert message.startswith("page.txtar:1: * count 1000000\nonly ")
    assert "(tried again for 0.05 s)" in message
    assert "it succeeded, and was expected to fail" in await refused("!* echo", tmp_path, engine(within=0.01))


async def test_files_are_compared_and_the_difference_is_shown(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("one\nthree\n")
    message = await refused("cmp a b", tmp_path)
    assert message.splitlines()[1] == "a and b differ"
    assert "-three" in message
    script = "cp a c\ncmp a c\nreplace two three c\ncmp c b\nrm c\n! exists c\nmkdir d\ncp a b d\ncmp d/a a\n"
    await ran(script + "echo\nempty stderr\ngrep -count=1 one a\n! grep -count=2 one a\n", tmp_path)


async def test_help_lists_commands_and_explains_one(tmp_path: Path) -> None:
    assert "shout    Print words\n" in (await ran("help", tmp_path)).stdout
    assert (await ran("help -v shout", tmp_path)).stdout.splitlines() == [
        "shout [--loud] [--to=...] word [word]",
        "    Print words",
        "    --loud, -l: Loudly",
        "    --to: To whom [all]",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sho", ["shout"]),
        ("! sho", ["shout"]),
        ("shout --", ["--loud", "--to="]),
        ("shout --to=", ["--to=all", "--to=one"]),
        ("help sho", ["shout"]),
        ("unknown ", []),
        ("shout ", []),
    ],
)
def test_a_line_that_is_being_typed_is_completed(line: str, words: list[str]) -> None:
    assert engine().complete(line) == words
