"""Slipstream beside Transformers, vLLM, OpenVINO GenAI and llama.cpp on a CPU: see README.md in this folder."""
