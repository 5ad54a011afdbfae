"""A peer for tests of the benchmark's driver: answers at once, with token ids that are a function of the prompt."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from benchmarks.peers.workers.loop import Answers, Loaded, Refused, serve


class Fake:
    def generate(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Answers:
        print("noise that a library prints")
        if options.get("die"):
            print("out of luck", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        if options.get("stop"):
            os.kill(os.getpid(), signal.SIGTERM)
        if options.get("one_at_a_time") and len(prompts) > 1:
            raise Refused("one at a time")
        short = options.get("short", 0)
        return Answers([[sum(prompt)] * (max_tokens - short) for prompt in prompts], 0.5, 0.1)


def load(request: dict[str, Any]) -> Loaded:
    if "refuse" in request["options"]:
        raise ValueError(request["options"]["refuse"])
    return Loaded(Fake(), {"fake": "1"}, [f"threads {request['threads']}"])


if __name__ == "__main__":
    serve(load)
