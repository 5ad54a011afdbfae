"""The parts of a form with a file, as clients send one (RFC 7578)."""

from __future__ import annotations

from email.message import Message

from slipstream.serve.api.errors import ApiError

MAX_FIELDS = 64
"""Most parts of a form."""
MAX_HEADERS_BYTES = 8192
"""Most bytes of one part's headers."""


def boundary_of(content_type: str) -> bytes:
    """What separates the parts, as the header says; raises `ApiError` 415 for another type of body."""
    header = Message()
    header["Content-Type"] = content_type
    found = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(found, str) or not found:
        message = (
            f"the body must be a form with a file, multipart/form-data with a boundary, not {content_type!r}"
        )
        raise ApiError(415, message, code="unsupported_media_type")
    return found.encode("latin-1", "replace")


def fields_of(raw: bytes, boundary: bytes) -> dict[str, bytes]:
    """Name to content of each part; raises `ApiError` 400 for a body that is no such form, or names a part twice."""
    mark = b"\r\n--" + boundary
    parts = (b"\r\n" + raw).split(mark, MAX_FIELDS + 2)
    if len(parts) < 2 or len(parts) > MAX_FIELDS + 2 or not parts[-1].startswith(b"--"):
        raise _refusal(f"the body is no whole form of at most {MAX_FIELDS} parts")
    fields: dict[str, bytes] = {}
    for part in parts[1:-1]:
        head, found, content = part.partition(b"\r\n\r\n")
        if not found or len(head) > MAX_HEADERS_BYTES:
            raise _refusal("a part of the form has no headers, or too long ones")
        name = _name(head)
        if name in fields:
            raise _refusal(f"the form has the part {name!r} twice")
        fields[name] = content
    return fields


def _name(head: bytes) -> str:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            header = Message()
            header["Content-Disposition"] = value.decode("utf-8", "replace").strip()
            name = header.get_param("name", header="content-disposition")
            if isinstance(name, str):
                return name
    raise _refusal("a part of the form has no name")


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_form")
