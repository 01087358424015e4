"""What a line of the log looks like, at little cost: there is one for every request."""

import logging
import time


class CheapFormatter(logging.Formatter):
    """The usual line. The time's text is made once a second."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._second = 0
        self._text = ""

    def format(self, record: logging.LogRecord) -> str:
        """As ``logging`` does it, without the detours that a plain line does not need."""
        if record.args or record.exc_info or record.stack_info:
            return super().format(record)
        return f"{self.formatTime(record)} {record.levelname} {record.name}: {record.msg}"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        """As ``logging`` writes it by default."""
        second = int(record.created)
        if second != self._second or datefmt is not None:
            self._second = second
            self._text = time.strftime(datefmt or self.default_time_format, self.converter(record.created))
        return f"{self._text},{int(record.msecs):03d}"


def log_to_stderr() -> None:
    """Log everything of some weight, and have ``logging`` find out nothing that no line tells."""
    handler = logging.StreamHandler()
    handler.setFormatter(CheapFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # The ways that logging's own documentation tells ("Optimization", in its how-to).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
