"""Shell completion for the command line of a hive.

The script calls the command itself with the present line, so it is always up to date.
"""

import re
from collections.abc import Iterable, Sequence

from lifecycle.graph.views import VIEWS
from lifecycle.settings import values
from lifecycle.settings.options import CONFIG_DIR, Option

__all__ = ["SHELLS", "candidates", "script"]

_BASH = """\
_FUNCTION() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=($("${COMP_WORDS[0]}" completion words "$line" 2>/dev/null))
    local word="${line##* }"
    case "$word" in *[=:]*) # readline breaks words there: it has that part already
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}");;
    esac
    case "${COMPREPLY[0]}" in *=) compopt -o nospace;; esac
}
complete -o default -F _FUNCTION NAME
"""
_ZSH = """\
#compdef NAME
_FUNCTION() {
    local -a found flags
    found=("${(@f)$("${words[1]}" completion words "${words[1,CURRENT]}" 2>/dev/null)}")
    flags=(${(M)found:#*=})
    found=(${found:#*=})
    [[ -n "$flags" ]] && compadd -S '' -- $flags
    [[ -n "$found" ]] && compadd -- $found
    [[ -n "$flags$found" ]] || _files
}
compdef _FUNCTION NAME
"""
_FISH = """\
function _FUNCTION
    NAME completion words (commandline -cp) 2>/dev/null
end
complete -c NAME -a '(_FUNCTION)'
"""

SHELLS: dict[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""The scripts, with NAME and FUNCTION as placeholders."""


def script(shell: str, name: str) -> str:
    """Return the script that `shell` sources for a command of that name."""
    function = re.sub(r"\W", "_", name) + "_complete"
    return SHELLS[shell].replace("FUNCTION", function).replace("NAME", name)


def candidates(
    options: Iterable[Option], commands: Iterable[str], more: Sequence[str], line: str
) -> list[str]:
    """Completions of the last word; none for values that only the user knows."""
    words = line.split(" ")
    before, word = [part for part in words[1:-1] if part], words[-1] if len(words) > 1 else ""
    by_flag = {f"--{option.name}": option for option in options}
    if word.startswith("-") and "=" in word:
        flag, _, value = word.partition("=")
        return [f"{flag}={choice}" for choice in _values(by_flag.get(flag)) if choice.startswith(value)]
    if before and before[-1] in by_flag and not _is_switch(by_flag[before[-1]]):
        return [choice for choice in _values(by_flag[before[-1]]) if choice.startswith(word)]
    if word.startswith("-"):
        flags = [flag if _is_switch(option) else f"{flag}=" for flag, option in by_flag.items()]
        return [flag for flag in sorted([*flags, f"--{CONFIG_DIR}=", *more]) if flag.startswith(word)]
    if before[:1] == ["completion"]:
        return [shell for shell in SHELLS if shell.startswith(word) and len(before) == 1]
    if before[:1] == ["inspect"]:
        return [view for view in VIEWS if view.startswith(word) and len(before) == 1]
    return [command for command in commands if command.startswith(word) and not before]


def _is_switch(option: Option) -> bool:
    return values.bare(option.kind)[0] is bool


def _values(option: Option | None) -> list[str]:
    if option is None:
        return []
    kind = values.bare(option.kind)[0]
    return ["false", "true"] if kind is bool else [values.show(choice) for choice in values.choices(kind)]
