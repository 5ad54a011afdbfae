"""Where measured profiles are kept: one file a profile in the user's cache folder, named by its key."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

from slipstream.config import cache_folder
from slipstream.core.whole_files import write_whole
from slipstream.errors import ConfigError
from slipstream.profiling.plausible import implausible
from slipstream.profiling.profile import CostProfile, ProfileKey

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when a file of another version could be misread."""

_AGAIN = "measure again with slipstream info --measure"


def profiles_folder() -> Path:
    """`profiles` in the cache folder; it need not exist."""
    return cache_folder() / "profiles"


def prepare_folder() -> Path:
    """The folder, made if need be. Raises `ConfigError` when no file could be written there."""
    folder = profiles_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"profiles cannot be saved in {str(folder)!r} ({error.strerror}); "
            "set SLIPSTREAM_CACHE to a folder that can be written"
        ) from None
    return folder


def save(profile: CostProfile) -> Path:
    """Write the profile, replacing an earlier one of its key. A reader sees the old file or the new one."""
    folder = prepare_folder()
    text = json.dumps({"format": FORMAT, "profile": profile.as_json()}, indent=1, ensure_ascii=False)
    path = folder / f"{profile.key.digest()}.json"
    write_whole(path, text.encode())
    return path


def load(path: Path) -> CostProfile:
    """Raises `ConfigError` when the file cannot be read, is damaged, or has another format."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"profile {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"profile {str(path)!r} is not valid JSON; {_AGAIN}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f"profile {str(path)!r} is not of format {FORMAT}; {_AGAIN}")
    if not isinstance(values.get("profile"), dict):
        raise ConfigError(f"profile {str(path)!r} is damaged: it has no 'profile'; {_AGAIN}")
    try:
        return CostProfile.from_json(values["profile"])
    except ConfigError as error:
        raise ConfigError(f"profile {str(path)!r} is damaged: {error}; {_AGAIN}") from None


def find(key: ProfileKey) -> CostProfile | None:
    """The profile that was saved for exactly this key, or None. Warns of a file that cannot be used."""
    path = profiles_folder() / f"{key.digest()}.json"
    if not path.is_file():
        return None
    try:
        profile = load(path)
    except ConfigError as error:
        logger.warning("%s", error)
        return None
    if profile.key != key:
        logger.warning("profile %r is another machine's or model's; %s", str(path), _AGAIN)
        return None
    fault = implausible(profile)
    if fault is not None:
        logger.warning("profile %r cannot be true: %s; %s", str(path), fault, _AGAIN)
        return None
    return profile
