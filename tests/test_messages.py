"""What the library says: heard by whoever wants to, and at nobody's expense."""

from __future__ import annotations

import logging

import pytest

from everyrank.messages import log


def test_a_message_names_the_line_that_says_it(caplog: pytest.LogCaptureFixture):
    """It comes by the logger of the package, with its arguments and its cause."""
    try:
        raise ValueError("hm")
    except ValueError:
        log.warning("%d of %d", 1, 2, exc_info=True)
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == (
        "everyrank",
        logging.WARNING,
        "1 of 2",
    )
    assert record.filename == "test_messages.py"
    assert record.exc_info is not None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_handler_that_fails_hurts_nobody(error: type[BaseException]):
    """Whoever says something goes on; only what is meant to end the program is let through."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise error

    broken = Broken()
    logging.getLogger("everyrank").addHandler(broken)
    try:
        if error is RuntimeError:
            log.warning("nobody hears this")
        else:
            with pytest.raises(KeyboardInterrupt):
                log.warning("nor this")
    finally:
        logging.getLogger("everyrank").removeHandler(broken)
