"""Slipstream beside its peers on this CPU: same checkpoints, prompts, threads and token counting, interleaved.

    python -m benchmarks.peers.run                       # everything; leave the machine alone while it runs
    python -m benchmarks.peers.run --quick               # one round of few tokens, results beside the environments
    python -m benchmarks.peers.run --models expanded-300m --peers slipstream,openvino --modes off,draft
    python -m benchmarks.peers.run --contexts 128,1536 --models expanded-300m --weights int8
    python -m benchmarks.peers.run --contexts 128 --weights int8 --modes off --neighbours 0,1,2 --quota 1.5

Builds what is missing (environments, expanded and converted models), then runs round by round. A run that was
stopped goes on where it was. Writes docs/benchmarks/cpu_peers.json and, from it, docs/benchmarks/cpu.md; with
--contexts, of which every run may add some, cpu_contexts.json and cpu_contexts.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.harness.command import DOCS, ROOT, command
from benchmarks.peers.catalog import CATALOG, CONTEXTS, PEERS, Catalog, load_catalog
from benchmarks.peers.driver import Driver, console
from benchmarks.peers.environments import Elsewhere
from benchmarks.peers.model_run import run_models
from benchmarks.peers.page import PAGES, write
from benchmarks.peers.results import Results, resume
from benchmarks.peers.selection import selected
from slipstream.config import check_at_least
from slipstream.errors import ConfigError, SlipstreamError

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "slipstream-peers"
RESULTS = DOCS / "cpu_peers.json"
CONTEXT_RESULTS = DOCS / "cpu_contexts.json"


def code_fingerprint() -> str:
    """What the figures depend on in this checkout: Slipstream's own code, the workers and their requirements."""
    folder = Path(__file__).parent
    files = [
        *ROOT.glob("src/slipstream/**/*.py"),
        *ROOT.glob("src/slipstream/models/cpu/kernels/*"),
        *folder.glob("workers/*.py"),
        *folder.glob("requirements/*.txt"),
        folder / "environments.py",
    ]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def check_definitions(results: Results, catalog: Catalog) -> None:
    """Raise `ConfigError` when a mode that has samples is defined otherwise by now."""
    definitions = {mode.key: dataclasses.asdict(mode) for mode in catalog.modes}
    for name, entry in results.modes.items():
        key = name.split(": ", 1)[1]
        if key in definitions and entry["definition"] != definitions[key]:
            raise ConfigError(f"mode {key!r} was defined otherwise when its samples were taken; give --fresh")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command(__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, one prompt a task, 24 tokens")
    parser.add_argument("--prepare", action="store_true", help="make what is missing, measure nothing")
    parser.add_argument("--models", help="names of models, with commas; all unless given")
    parser.add_argument("--peers", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--modes", help="names, kinds or weights of modes, with commas")
    parser.add_argument(
        "--weights", help="weight formats, with commas; int8 means Q8_0 too, int4 every one of 4 bits"
    )
    parser.add_argument("--caches", help="types of keys and values, with commas; peers have their own")
    parser.add_argument("--contexts", help="measure prompts of these lengths instead, with commas: 128,1536")
    parser.add_argument("--neighbours", help="with --contexts: busy loops beside, with commas: 0,1,2")
    parser.add_argument("--quota", type=float, help="with --contexts: also under a quota of so many cores")
    parser.add_argument("--prompts-per-task", type=int, help="instead of each model's own")
    parser.add_argument("--max-tokens", type=int, help="instead of each model's own")
    parser.add_argument("--rounds", type=int, help="instead of each model's own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the order in which modes take turns")
    parser.add_argument(
        "--venvs", type=Path, default=CACHE / "venvs", help="where the peers' environments are"
    )
    parser.add_argument(
        "--environments",
        default="",
        help="environments that exist, used as they are: openvino=FOLDER,vllm=FOLDER",
    )
    parser.add_argument(
        "--llama-binaries", type=Path, help="folder of llama-server and llama-quantize, built already"
    )
    parser.add_argument("--models-dir", type=Path, default=CACHE / "models", help="where larger models are")
    parser.add_argument(
        "--out", "--output", dest="out", type=Path, help="results; in docs/benchmarks unless --quick"
    )
    parser.add_argument("--fresh", action="store_true", help="replace earlier results instead of going on")
    options = parser.parse_args(arguments)
    if options.out is None:
        result = CONTEXT_RESULTS if options.contexts else RESULTS
        options.out = options.venvs / f"{result.stem}_quick.json" if options.quick else result
    options.venvs, options.models_dir = options.venvs.resolve(), options.models_dir.resolve()
    return options


def elsewhere(options: argparse.Namespace) -> Elsewhere:
    """What the command line says lies ready; raises `ConfigError` where it does not."""
    pairs = [word.partition("=") for word in options.environments.split(",") if word]
    if any(not folder for _, _, folder in pairs):
        raise ConfigError(f"--environments takes PEER=FOLDER with commas, got {options.environments!r}")
    binaries = options.llama_binaries
    made = Elsewhere(
        {peer: Path(folder).absolute() for peer, _, folder in pairs},
        binaries.absolute() if binaries else None,
    )
    made.check()
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    started_s = time.monotonic()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # workers are ended on the way out
    try:
        check_at_least("--", 1, threads=options.threads)
        options.elsewhere = elsewhere(options)
        catalog = selected(load_catalog(CONTEXTS if options.contexts else CATALOG), options)
        settings = {
            "threads": options.threads,
            "seed": options.seed,
            **({"contexts": True} if options.contexts else {}),
            "models": {model.name: model.as_settings() for model in catalog.models},
        }
        results = resume(options.out, settings, code_fingerprint(), fresh=options.fresh)
        check_definitions(results, catalog)
        driver = Driver(options, catalog, results)
        if options.prepare:
            driver.prepare()
            return 0
        run_models(driver)
        known = options.out in (RESULTS, CONTEXT_RESULTS)
        page = options.out.with_name(PAGES[options.out.name]) if known else options.out.with_suffix(".md")
        write(results, options.out, page)
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(f"{(time.monotonic() - started_s) / 60:.0f} minutes; wrote {options.out} and {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
