"""Bases of options that are not served: those that refuse other values, and those that change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lifecycle import Settings, refuse


class WithoutEffect(Settings, frozen=True):
    """Options that are accepted with any value of their type, and change nothing."""


class UnservedSettings(Settings, frozen=True):
    """Options that may only ask for what the agent does anyway: their defaults, and what ``also`` lists."""

    also: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Further values of an option that ask for the same."""

    def validate(self) -> None:
        """Refuse every other value, all at once; raises ValueErrors of one line."""
        refuse(
            f"{field.replace('_', '-')}={_text(value)}: not supported yet, {_expected(accepted)}"
            for field, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
            if (value := getattr(self, field)) not in (accepted := (default, *self.also.get(field, ())))
        )


def _expected(accepted: tuple[object, ...]) -> str:
    texts = [text for value in accepted if (text := _text(value))]
    return f"expected {' or '.join(texts)}, or leave it unset" if texts else "leave it unset"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
