"""The server that the soak asks, in a process of its own: as `slipstream serve`, and `GET /integrity` beside it."""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from dataclasses import replace
from typing import Any

import psutil

from slipstream import AsyncEngine
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config
from slipstream.config import SpeculativeConfig
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.serve import logs
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.lifecycle import DrainingServer
from slipstream.serve.network.listening import bind

SMALL_CACHE = {"suffix_decoding_max_cached_requests": 500}


def books(engine: Engine) -> dict[str, Any]:
    """What an idle engine holds, and what is wrong with it. Asked between two steps.

    Memory is told as Python's containers and small blocks, as bytes in use in the C library's heap, and as what the
    process holds: a heap with holes holds more than is in use, and a leak shows in all of them.
    """
    gc.collect()
    stats = engine.stats()
    return {
        "faults": engine.integrity(),
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_held_slots": stats.num_held_slots,
        "has_unfinished": engine.has_unfinished,
        "num_objects": len(gc.get_objects()),
        "num_blocks": sys.getallocatedblocks(),
        "malloc_bytes": malloc_bytes(),
        "rss_bytes": psutil.Process().memory_info().rss,
    }


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def malloc_bytes() -> int | None:
    """Bytes in use in the C library's heap, after what is free was given back; None where it cannot say."""
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        library.mallinfo2.restype = _Mallinfo
        info = library.mallinfo2()
    except (OSError, AttributeError):
        return None
    return int(info.uordblks + info.hblkhd)


MAX_MODEL_LEN = 400
"""What the small cache holds beside any drafter."""


def with_small_cache(speculation: SpeculativeConfig) -> SpeculativeConfig:
    """Suffix decoding remembers few enough answers to be full before half of the requests are over: what grows then is
    a leak."""
    if speculation.method == "suffix":
        return replace(speculation, options={**speculation.options, **SMALL_CACHE})
    if speculation.method != "auto":
        return speculation
    drafters = [
        {**drafter, **(SMALL_CACHE if drafter["method"] == "suffix" else {})}
        for drafter in speculation.options["drafters"]
    ]
    return replace(speculation, options={**speculation.options, "drafters": drafters})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", help="the drafter in short; the embedded draft unless given")
    parser.add_argument("--kv-cache-bytes", type=int, default=8 * 2**20)
    parser.add_argument("--max-num-seqs", type=int, default=24)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    config = ServeConfig(port=options.port, log_level="warning", per_request_metrics=True)
    logs.configure(config)
    bound = bind(config.host, config.port)
    speculation = with_small_cache(speculative_config(SpeculationFlags(spec=options.spec), None))
    sizes = {
        "kv_cache_bytes": options.kv_cache_bytes,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": MAX_MODEL_LEN,
    }
    engine = AsyncEngine(
        engine=make_engine(None, speculation, sizes), stream_interval_s=config.stream_interval_s
    )
    app = create_app(engine, config, "embedded-pair")

    @app.get("/integrity")
    async def integrity() -> dict[str, Any]:
        return await engine.ask(books)

    DrainingServer(app).run(sockets=[bound])


if __name__ == "__main__":
    main()
