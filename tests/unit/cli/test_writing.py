"""A disk that cannot be written is the user's to mend, whichever library was writing: exit code 2 and one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.cli.output.writing import check_file, unwritable, write_text
from slipstream.errors import ConfigError

FULL = "/dev/full"
pytestmark = pytest.mark.skipif(not Path(FULL).exists(), reason="needs a device that is always full")


def _stream() -> None:
    with Path(FULL).open("w", buffering=1) as stream:
        stream.write("x\n")


def _torch_stream() -> None:
    with Path(FULL).open("wb", buffering=0) as stream:
        torch.save(torch.zeros(10**5), stream)


WRITERS: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: write_text(Path(FULL), "x"), f"cannot write '{FULL}': No space left on device"),
    "stream": (_stream, "cannot write: No space left on device"),
    "torch": (lambda: torch.save(torch.zeros(10**6), FULL), "cannot write weights: the disk is full"),
    "torch stream": (_torch_stream, "cannot write: No space left on device"),
    "folder": (lambda: Path("/").joinpath("etc/passwd/x").mkdir(), "cannot read or write '/etc/passwd/x'"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_disk_says_is_told(writer: str) -> None:
    write, told = WRITERS[writer]
    with pytest.raises((OSError, RuntimeError)) as raised:
        write()
    assert (unwritable(raised.value) or "").startswith(told)


def test_safetensors_on_a_full_disk(tmp_path: Path) -> None:
    """Its writer makes the file anew beside it, so a limit on the size of files stands for the full disk."""
    program = (
        "import resource, torch; from safetensors.torch import save_file\n"
        "from slipstream.cli.output.writing import unwritable\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"try: save_file({{'a': torch.zeros(10**4)}}, {str(tmp_path / 'w.safetensors')!r})\n"
        "except Exception as error: print(unwritable(error))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == f"cannot write weights: {os.strerror(errno.EFBIG)}\n", done.stderr


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), FileNotFoundError(errno.ENOENT, "no", "x"), OSError("no number")]
)
def test_faults_of_ours_stay_ours(error: Exception) -> None:
    assert unwritable(error) is None


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError(errno.ENOSPC, "full", "a/b"), 2, "error: cannot write 'a/b': No space left on device\n"),
        (
            OSError(errno.EIO, "broken"),
            1,
            "error: OSError: [Errno 5] broken (slipstream --debug … shows where)\n",
        ),
    ],
)
def test_any_verb_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: OSError, code: int, told: str
) -> None:
    """The place is the command itself, whatever the verb."""

    def fails(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("slipstream.cli.tree.load", fails)
    done = CliRunner().invoke(app, ["tree"])
    assert (done.exit_code, done.stderr) == (code, f"loading the embedded pair\n{told}")


def test_standard_output_on_a_full_disk() -> None:
    with Path(FULL).open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "slipstream.cli.main", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "error: cannot write: No space left on device\n")


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    check_file(file, overwrite=False)
    file.touch()
    with pytest.raises(ConfigError, match=r"--plot: cannot write .* is there already; .* --overwrite"):
        check_file(file, overwrite=False, flag="--plot")
    check_file(file, overwrite=True)
    with pytest.raises(ConfigError, match="is a folder"):
        check_file(tmp_path, overwrite=True)
