"""What a training process says when it refuses its job."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refusal(call: Callable[[], object], caplog: pytest.LogCaptureFixture) -> str:
    """The one line with which `call` ends the process; any refusal raises the same."""
    caplog.clear()
    with pytest.raises(SystemExit) as ended:
        call()
    assert ended.value.code == 1
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    message: str = record.getMessage()
    begin, _, reason = message.partition("cookbook refuses: ")
    assert not begin and reason and "\n" not in reason, message
    return reason
