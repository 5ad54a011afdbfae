"""vLLM's own argument parser and configuration: each case is the words behind `vllm serve`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    cases = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):
        import vllm
        from vllm.config import SpeculativeConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        verdicts = {name: verdict(parser, EngineArgs, words) for name, words in cases.items()}
    keys = sorted(SpeculativeConfig.__dataclass_fields__)
    print(json.dumps({"version": vllm.__version__, "verdicts": verdicts, "keys": keys}))


def verdict(parser, engine_args, words):
    """What its configuration says of the words: its speculative settings, or its error."""
    target, *rest = words
    try:
        parsed = parser.parse_args(["--model", target, "--dtype", "float32", "--max-model-len", "512", *rest])
        config = engine_args.from_cli_args(parsed).create_engine_config().speculative_config
    except (Exception, SystemExit) as error:
        return {"accepted": False, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
    given = json.loads(rest[1]) if rest else {}
    read = {name: json.loads(json.dumps(getattr(config, name))) for name in given}
    other = {name: value for name, value in read.items() if value != given[name]}
    return {"accepted": not other, "read": read} | ({"error": f"read as {other}"} if other else {})


if __name__ == "__main__":
    main()
