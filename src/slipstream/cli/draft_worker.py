"""`slipstream draft-worker`: serves a drafter to engines in other processes or on other machines."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from slipstream.cli.flags.flags import FlagSet, Values, with_flags
from slipstream.cli.flags.options import EngineValues, ModelArgument, SpeculationValues, chosen_speculation
from slipstream.cli.output.console import stderr
from slipstream.cli.output.loading import say_loading
from slipstream.draft.remote.options import ServedOptions


@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    """A worker."""

    model: ModelArgument = None
    listen: str = "127.0.0.1:7070"
    """HOST:PORT or unix:PATH; beyond this machine it needs a key. Port 0 chooses a free one."""
    key_file: Path | None = None
    """File of the key that engines must know; by default the environment variable SLIPSTREAM_WORKER_KEY."""
    served: Annotated[Values, FlagSet(ServedOptions, "Worker")]
    speculation: SpeculationValues
    engine: EngineValues


@with_flags
def draft_worker(flags: WorkerFlags) -> None:
    """Serve a drafter for the target MODEL, of which only configuration and tokenizer are read.

    Engines of that target use it with --speculative-config '{"method": "remote", "workers": "HOST:PORT"}'. They send
    token ids, and get token ids; no text and no probabilities travel. Stop it with Ctrl-C.
    """
    say_loading(flags.model, "drafting for")
    speculative = chosen_speculation(flags.speculation, flags.model)
    from slipstream.draft.remote.address import Address
    from slipstream.draft.remote.handshake import read_key
    from slipstream.draft.remote.worker import DraftWorker, check_listening

    key = read_key(None if flags.key_file is None else str(flags.key_file))
    address = Address.parse(flags.listen)
    check_listening(address, key)
    options = ServedOptions(**flags.served)

    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.config import EngineConfig
    from slipstream.draft.remote.serving import serve_drafter

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = EngineConfig(model=flags.model or EMBEDDED_TARGET, **flags.engine)
    stderr().print(f"loading drafter {speculative.method}", markup=False)
    worker = DraftWorker(serve_drafter(config, speculative, options), address, key)

    def announce(bound: Address) -> None:
        stderr().print(f"serving drafter {speculative.method} at {bound}", markup=False)

    worker.run(announce, handle_signals=True)
