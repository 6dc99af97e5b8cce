"""What names may be: objects, labels, ports. Each function gives the problem in words, or nothing.

Source: k8s.io/apimachinery/pkg/util/validation.
"""

from __future__ import annotations

import re

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_NAME = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_VALUE = f"({_NAME})?"
_RFC1035 = "[a-z]([-a-z0-9]*[a-z0-9])?"


def subdomain_problem(name: str) -> str:
    """Of names of most objects."""
    if len(name) > 253:
        return "must be no more than 253 characters"
    if re.fullmatch(_SUBDOMAIN, name):
        return ""
    return (
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must"
        f" start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is"
        f" '{_SUBDOMAIN}')"
    )


def label_problem(name: str) -> str:
    """Of RFC 1123 labels: namespaces, ports."""
    if len(name) > 63:
        return "must be no more than 63 characters"
    if re.fullmatch(_LABEL, name):
        return ""
    return (
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and"
        f" end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is"
        f" '{_LABEL}')"
    )


def rfc1035_problem(name: str) -> str:
    """Of services before they were relaxed."""
    if len(name) > 63:
        return "must be no more than 63 characters"
    if re.fullmatch(_RFC1035, name):
        return ""
    return (
        "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic"
        " character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for"
        f" validation is '{_RFC1035}')"
    )


def path_segment_problem(name: str) -> str:
    """Of names of roles and the like."""
    if name in {".", ".."}:
        return f"may not be '{name}'"
    for one in ("/", "%"):
        if one in name:
            return f"may not contain '{one}'"
    return ""


def label_value_problem(value: str) -> str:
    """Of values of labels."""
    if len(value.encode()) > 63:
        return "must be no more than 63 bytes"
    if re.fullmatch(_VALUE, value):
        return ""
    return (
        "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must"
        " start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used"
        f" for validation is '{_VALUE}')"
    )


def qualified_name_problem(name: str) -> str:
    """Of keys of labels and annotations."""
    parts = name.split("/")
    if len(parts) > 2:
        return (
            "a valid label key must consist of alphanumeric characters, '-', '_' or '.', and must start and end"
            " with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for"
            f" validation is '{_NAME}') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
        )
    if len(parts) == 2:
        if not parts[0]:
            return "prefix part must be non-empty"
        if problem := subdomain_problem(parts[0]):
            return f"prefix part {problem}"
    if not parts[-1]:
        return "name part must be non-empty"
    if len(parts[-1].encode()) > 63:
        return "name part must be no more than 63 bytes"
    if re.fullmatch(_NAME, parts[-1]):
        return ""
    return (
        "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an"
        " alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is"
        f" '{_NAME}')"
    )


def config_key_problem(key: str) -> str:
    """Of keys of config maps and secrets."""
    if len(key) > 253:
        return "must be no more than 253 characters"
    if not re.fullmatch("[-._a-zA-Z0-9]+", key):
        return (
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or"
            " 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
        )
    return ""


def port_name_problem(name: str) -> str:
    """Of names of ports (RFC 6335)."""
    if len(name) > 15:
        return "must be no more than 15 characters"
    if not re.fullmatch("[-a-z0-9]+", name):
        return "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)"
    if not re.search("[a-z]", name):
        return "must contain at least one letter (a-z)"
    if "--" in name:
        return "must not contain consecutive hyphens"
    if name[0] == "-" or name[-1] == "-":
        return "must not begin or end with a hyphen"
    return ""
