"""Rate limits of endpoint operations: Cilium's defaults, changed by ``api-rate-limit``.

An unknown name is refused, unlike in Cilium. GET /config has no limiter, because CNI plugins poll it twice a
second.

Source: Cilium 1.17, api-rate-limit and its defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from cells.api.limiter import Limiter, LimitExceeded, Parameters
from cells.api.operations import Operation, Route
from cells.api.wire import FrameworkError, answer
from lifecycle import Duration, Logger, Settings
from lifecycle.http import Refusal, Request, Response

CREATE: Final = "endpoint-create"
DELETE: Final = "endpoint-delete"
GET: Final = "endpoint-get"
PATCH: Final = "endpoint-patch"
LIST: Final = "endpoint-list"

_DEFAULTS: Final[Mapping[str, Parameters]] = {
    CREATE: Parameters(
        auto_adjust=True,
        estimated_processing_duration=2.0,
        rate_limit=0.5,
        rate_burst=4,
        parallel_requests=4,
        min_parallel_requests=2,
        skip_initial=4,
        max_wait_duration=60.0,
    ),
    DELETE: Parameters(
        auto_adjust=True,
        estimated_processing_duration=0.2,
        parallel_requests=4,
        min_parallel_requests=4,
    ),
    GET: Parameters(
        auto_adjust=True,
        estimated_processing_duration=0.2,
        rate_limit=4.0,
        rate_burst=4,
        parallel_requests=4,
        min_parallel_requests=2,
        skip_initial=4,
        max_wait_duration=10.0,
    ),
    PATCH: Parameters(
        auto_adjust=True,
        estimated_processing_duration=1.0,
        rate_limit=0.5,
        rate_burst=4,
        parallel_requests=4,
        skip_initial=4,
        max_wait_duration=15.0,
    ),
    LIST: Parameters(
        auto_adjust=True,
        estimated_processing_duration=0.3,
        rate_limit=1.0,
        rate_burst=4,
        parallel_requests=2,
        min_parallel_requests=2,
    ),
}
NAMES: Final = tuple(_DEFAULTS)

_ALL: Final = "/v1/endpoint"
_ONE: Final = "/v1/endpoint/{id}"
_OF_ONE: Final = {"PUT": CREATE, "DELETE": DELETE, "GET": GET, "PATCH": PATCH}


class LimitSettings(Settings, frozen=True):
    """Settings of the API's rate limits."""

    api_rate_limit: dict[str, str] = msgspec.field(default_factory=dict)
    """Changes to Cilium's rate limits of endpoint operations:
    endpoint-create=rate-limit:10/m,rate-burst:2."""

    def faults(self) -> Iterable[str]:
        return (
            f"api-rate-limit={name}={given}: {error}"
            for name, given in self.api_rate_limit.items()
            if (error := _error(name, given))
        )

    def parameters(self) -> dict[str, Parameters]:
        """Return the parameters of every limiter, by name."""
        return {name: _merged(base, self.api_rate_limit.get(name, "")) for name, base in _DEFAULTS.items()}


def limiter_name(method: str, path: str) -> str | None:
    """Return the name of a route's limiter; None if the route is not limited."""
    if path == _ALL:
        return {"GET": LIST, "DELETE": DELETE}.get(method)
    return _OF_ONE.get(method) if path == _ONE or path.startswith(f"{_ONE}/") else None


def _error(name: str, given: str) -> str:
    if name not in _DEFAULTS:
        return f"no such limiter, expected one of {', '.join(NAMES)}"
    try:
        merged = _merged(_DEFAULTS[name], given)
    except ValueError as error:
        return str(error)
    longest = merged.max_wait_duration
    if longest and merged.min_wait_duration > longest:
        return f"no request would ever be answered, expected a min-wait-duration within {Duration(longest)}"
    return ""


def _merged(base: Parameters, given: str) -> Parameters:
    """Apply ``option:value,option:value`` to parameters. Raises ValueError (one line)."""
    changes: dict[str, float] = {}
    for word in filter(None, (part.strip() for part in given.split(","))):
        option, colon, text = word.partition(":")
        if not colon:
            raise ValueError(f"{word!r}: expected option:value, with commas between several")
        if (parse := _OPTIONS.get(option.lower())) is None:
            raise ValueError(f"{option!r}: no such option, expected one of {', '.join(_OPTIONS)}")
        field = option.lower().replace("-", "_")
        try:
            changes[field] = parse(text)
        except ValueError as error:
            raise ValueError(f"{word!r}: {error}") from None
    unset = Parameters()
    for field in _ZERO_IS_UNSET & changes.keys():
        changes[field] = changes[field] or getattr(unset, field)
    return replace(base, **changes)


def _rate(text: str) -> float:
    """Parse ``10/s``, ``3.5/h`` or ``1/100ms`` to requests per second."""
    number, slash, interval = text.partition("/")
    try:
        span = Duration.parse(interval if re.match(r"[0-9.]", interval) else f"1{interval}")
        rate = _number(number) / span if slash and span > 0 else math.nan
    except ValueError:
        rate = math.nan
    if not math.isfinite(rate):
        raise ValueError("expected a rate such as 10/s, 3.5/m or 1/100ms")
    return rate


def _duration(text: str) -> float:
    if (duration := Duration.parse(text)) < 0:
        raise ValueError("expected a duration such as 15s, not less than 0")
    return duration


def _boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        raise ValueError("expected true or false")
    return _BOOLEANS[text]


def _whole(text: str) -> int:
    if re.fullmatch(r"\+?[0-9]{1,9}", text) is None:
        raise ValueError("expected a whole number, 0 to 999999999")
    return int(text)


def _number(text: str) -> float:
    if re.fullmatch(r"\+?([0-9]{1,15}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,2})?", text) is None:
        raise ValueError("expected a number, not less than 0")
    return float(text)


def _share(text: str) -> float:
    if (share := _number(text)) > 1:
        raise ValueError("expected a number between 0 and 1")
    return share


def _times(text: str) -> float:
    if 0 < (times := _number(text)) < 1:
        raise ValueError("expected a number that is at least 1, or 0 for the default")
    return times


_BOOLEANS: Final = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}
_OPTIONS: Final[Mapping[str, Callable[[str], float]]] = {
    "rate-limit": _rate,
    "rate-burst": _whole,
    "min-wait-duration": _duration,
    "max-wait-duration": _duration,
    "estimated-processing-duration": _duration,
    "auto-adjust": _boolean,
    "parallel-requests": _whole,
    "min-parallel-requests": _whole,
    "max-parallel-requests": _whole,
    "mean-over": _whole,
    "delayed-adjustment-factor": _share,
    "max-adjustment-factor": _times,
    "skip-initial": _whole,
    "log": _boolean,
}
_ZERO_IS_UNSET: Final = frozenset(
    {
        "rate_burst",
        "min_parallel_requests",
        "mean_over",
        "delayed_adjustment_factor",
        "max_adjustment_factor",
    }
)
"""Options of which zero selects the default if the limiter has no configuration, as in Cilium."""


# Operations with limiters.
#
# Source: Cilium 1.17. A refusal is 429 with a JSON string as body, although the schema has none.

TOO_MANY: Final = 429


class Limits:
    """The API's limiters, by name."""

    def __init__(self, settings: LimitSettings, log: Logger) -> None:
        self.limiters = {
            name: Limiter(name, parameters, log) for name, parameters in settings.parameters().items()
        }

    def limited(self, route: Route) -> Operation:
        """Wrap a route's operation with its limiter; unchanged if the route is not limited."""
        name = limiter_name(route.method, route.path)
        if name is None:
            return route.operation
        limiter = self.limiters[name]

        async def operate(request: Request) -> Response:
            try:
                admission = await limiter.enter(request.disconnected)
            except LimitExceeded as refused:
                return answer(TOO_MANY, str(refused))
            status = 500
            try:
                response = await _response(route, request)
                status = response.status
            except FrameworkError as error:
                status = error.status
                raise
            finally:
                admission.done(status)
            return response

        return operate

    def open(self) -> None:
        """Admit requests to the queues, when the server starts."""
        for limiter in self.limiters.values():
            limiter.open()

    def close(self) -> None:
        """Refuse all queued requests, when the server stops."""
        for limiter in self.limiters.values():
            limiter.close()


async def _response(route: Route, request: Request) -> Response:
    """Run the operation and convert a Refusal to a response, as the limiter counts by status."""
    try:
        return await route.operation(request)
    except Refusal as error:
        return route.refusal(error)
