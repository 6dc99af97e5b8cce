"""Lines of logs: what structlog's own renderer would write, and the time in front."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.processors import LogfmtRenderer

from lifecycle.process.logfmt import render_logfmt
from tests.support.examples import scaled

texts = st.text(alphabet='ab \n"=\\:é', max_size=8)
values = texts | st.booleans() | st.none() | st.integers() | st.floats(allow_nan=False)
events = st.fixed_dictionaries(
    {"event": texts},
    optional={"level": texts, "module": texts, "endpoint": values, "error": values},
)


@settings(max_examples=scaled(60))
@given(events)
def test_a_line_is_quoted_as_structlog_quotes_it(event: dict[str, object]) -> None:
    reference = LogfmtRenderer(key_order=["level", "msg", "module"], drop_missing=True)
    renamed = {"msg" if key == "event" else key: value for key, value in event.items()}
    time, _, line = render_logfmt(None, "info", dict(event)).partition(" ")
    assert line == reference(None, "info", renamed)
    assert re.fullmatch(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time)


def test_an_exception_is_a_text_of_the_line() -> None:
    line = render_logfmt(None, "error", {"event": "failed", "exc_info": ValueError("no")})
    assert line.endswith('msg=failed exception="ValueError: no"')
