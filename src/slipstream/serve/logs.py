"""Structured logs: one JSON object a line, or text at a terminal, and one line a request. They hold no texts of users
unless configured so."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.api.errors import CLIENT_LEFT, LOG_FIELDS, clipped
from slipstream.serve.config import ServeConfig
from slipstream.serve.routes import RouteTable

if TYPE_CHECKING:
    from slipstream.serve.metrics.metrics import Metrics

logger = logging.getLogger("slipstream.serve.access")

ID_HEADER = "X-Request-Id"
MAX_PATH = 500
"""Most characters of a request's path in its line."""
_SANE_ID = re.compile(r"[\w.:-]{1,128}")
_PLAIN_WORD = re.compile(r"[\w.:/+%@,-]+")


class JsonFormatter(logging.Formatter):
    """Writes time, level, logger, message, and the fields that a record has under `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace(
            "\x7f", "\\u007f"
        )  # all other control characters are escaped


class TextFormatter(logging.Formatter):
    """The same for a person: one line a record, and below it the indented lines of an exception. A value with other
    than plain characters is quoted, so that no client can forge a line or a field.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        fields = getattr(record, "fields", {})
        line = escaped(self.formatMessage(record))
        lines = [" ".join([line, *(f"{key}={_value(value)}" for key, value in fields.items())])]
        if record.exc_info:
            lines += [f"    {escaped(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


def escaped(text: str) -> str:
    """The text with characters that are not printable escaped: line ends, terminals' escape sequences, controls of
    the direction of writing."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _value(value: Any) -> str:
    """A field's value as text; quoted unless it is one plain word, a number or a list."""
    text = str(value)
    if not isinstance(value, str) or _PLAIN_WORD.fullmatch(text):
        return escaped(text)
    return '"' + escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def chosen_format(config: ServeConfig) -> str:
    """The configured format, `json` or `text`; for `auto` what suits where standard error goes."""
    if config.log_format != "auto":
        return config.log_format
    return "text" if sys.stderr.isatty() else "json"


def configure(config: ServeConfig) -> None:
    """Send this process's logs to standard error in the configured format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if chosen_format(config) == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=config.log_level.upper(), force=True)
    logging.captureWarnings(True)


def take_over_transformers() -> None:
    """Send the logs of Transformers through our handlers; imports it."""
    import slipstream.models.huggingface  # noqa: F401, I001  (before any other module of Transformers)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


class RequestLog:
    """Gives every request an id, and writes a line when it is over."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: RouteTable) -> None:
        self._app = app
        self._routes = routes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        given = Headers(scope=scope).get(ID_HEADER.lower(), "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        fields: dict[str, Any] = {"request_id": request_id}
        scope[LOG_FIELDS] = fields
        status = CLIENT_LEFT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500
            raise
        finally:
            self._write(scope, status, time.perf_counter() - started_s)

    def _write(self, scope: Scope, status: int, duration_s: float) -> None:
        api = self._routes.find(scope).is_api
        if api:
            self._metrics.on_response(status)
        line = {
            "method": scope["method"],
            "path": clipped(scope["path"], MAX_PATH),
            "status": status,
            "duration_ms": round(1000 * duration_s, 3),
        }
        level = (
            logging.INFO if api else logging.DEBUG
        )  # probes, scrapes and the dashboard would flood the log
        logger.log(level, "request", extra={"fields": line | scope[LOG_FIELDS]})
