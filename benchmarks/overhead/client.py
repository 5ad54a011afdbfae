"""A light client in a process of its own: closed loops of streamed chats over raw sockets.

    python -m benchmarks.overhead.client PORT

Within a round it only collects bytes; they are read as HTTP and JSON when the clock has stopped. Rounds come as JSON
lines on standard input, what came of them goes to standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence as Seq
from typing import Any

_END = b"\r\n0\r\n\r\n"
"""End of a chunked body."""
_READ_BYTES = 2**16


async def closed_loop(port: int, bodies: Seq[dict[str, Any]], streams: int) -> dict[str, Any]:
    """Ask all, `streams` at any time, each stream on one connection. Raises RuntimeError for what is no answer."""
    requests = [_request(body) for body in bodies]
    responses = [b""] * len(requests)
    gaps_s: list[float] = []
    waiting = iter(range(len(requests)))
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(streams)]

    async def one_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in waiting:
            writer.write(requests[number])
            responses[number] = await _response(reader, gaps_s)

    started_s = time.perf_counter()
    await asyncio.gather(*(one_stream(*connection) for connection in connections))
    seconds = time.perf_counter() - started_s
    for _, writer in connections:
        writer.close()
        await writer.wait_closed()
    answers = [read_answer(response) for response in responses]
    return {
        "seconds": seconds,
        "num_tokens": sum(num_tokens for _, num_tokens, _ in answers),
        "num_events": sum(num_events for _, _, num_events in answers),
        "texts": [text for text, _, _ in answers],
        "gaps_s": gaps_s,
    }


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _response(reader: asyncio.StreamReader, gaps_s: list[float]) -> bytes:
    """Head and chunked body of one response; adds the time between what came and what came next."""
    response = bytearray()
    last_s = 0.0
    while not response.endswith(_END):
        received = await reader.read(_READ_BYTES)
        now_s = time.perf_counter()
        if response:
            gaps_s.append(now_s - last_s)
        last_s = now_s
        response += received
        if not received or not response.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"no stream came, but {bytes(response[:500])!r}")
    return bytes(response)


def read_answer(response: bytes) -> tuple[str, int, int]:
    """Text, tokens and events of a streamed chat. Raises RuntimeError where the stream broke off."""
    _, _, rest = response.partition(b"\r\n\r\n")
    body = bytearray()
    while (size := int(rest[: rest.index(b"\r\n")], 16)) > 0:
        start = rest.index(b"\r\n") + 2
        body += rest[start : start + size]
        rest = rest[start + size + 2 :]
    *events, done, nothing = bytes(body).split(b"\n\n")
    if (done, nothing) != (b"data: [DONE]", b""):
        raise RuntimeError(f"the stream broke off with {bytes(body[-500:])!r}")
    payloads = [json.loads(event.removeprefix(b"data: ")) for event in events]
    deltas = [choice["delta"] for payload in payloads for choice in payload["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, payloads[-1]["usage"]["completion_tokens"], len(events)


def main() -> None:
    port = int(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asyncio.run(closed_loop(port, asked["bodies"], asked["streams"]))), flush=True)


if __name__ == "__main__":
    main()
