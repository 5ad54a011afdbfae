"""Draft models and heads in the layouts that other engines load, and back."""

from slipstream.tools.export.checkpoints.convert import convert
from slipstream.tools.export.checkpoints.convert_back import convert_back
from slipstream.tools.export.checkpoints.head_folders import ConvertedCheckpoint

__all__ = ["ConvertedCheckpoint", "convert", "convert_back"]
