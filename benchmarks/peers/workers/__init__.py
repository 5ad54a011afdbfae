"""One worker a peer, run by that peer's own interpreter: `python -m benchmarks.peers.workers.vllm`."""
