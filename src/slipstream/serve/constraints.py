"""What a request wants its text to obey: JSON, a schema, tools.

The one place where `response_format` and `tools` are read. Constrained decoding is not built yet, so whatever asks
for it is refused; free text and `tool_choice` none ask for nothing.
"""

from __future__ import annotations

from slipstream.serve.errors import ApiError
from slipstream.serve.schema import ChatBody, GenerationBody


def check_constraints(body: GenerationBody) -> None:
    """Raise `ApiError` 400 for a request whose text would have to obey something."""
    wanted = (body.response_format or {"type": "text"}).get("type")
    if wanted != "text":
        message = f"response_format of type {wanted!r} is not supported by this server; only 'text' is"
        raise ApiError(400, message, param="response_format", code="unsupported_parameter")
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        message = "tools are not supported by this server; leave them out, or set tool_choice to 'none'"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
