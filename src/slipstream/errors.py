"""Errors that Slipstream raises on purpose. Each message says what is wrong and what would be right.

SlipstreamError
├── ConfigError             an unknown key or a bad value in a configuration
├── RequestError            an invalid prompt or sampling parameter
├── ModelError              a checkpoint that cannot be loaded
│   ├── UnsupportedModelError       an architecture that cannot be decoded exactly here
│   └── VocabularyMismatchError     a draft whose tokens are not the target's
├── CapacityError           something that does not fit into the planned memory
├── EngineStoppedError      the engine was closed, or failed, while a request was running
└── RemoteError             a remote server that cannot be reached or gives no valid answer
"""


class SlipstreamError(Exception):
    """Base of all errors raised on purpose; its message can be shown to a user."""


class ConfigError(SlipstreamError, ValueError):
    """A configuration has an unknown key or a value out of range."""


class RequestError(SlipstreamError, ValueError):
    """A prompt or a sampling parameter is invalid."""


class ModelError(SlipstreamError):
    """A checkpoint cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The architecture cannot be decoded exactly with this engine."""


class VocabularyMismatchError(ModelError):
    """The draft's vocabulary is not the target's."""


class CapacityError(SlipstreamError):
    """Something does not fit into the planned memory."""


class EngineStoppedError(SlipstreamError):
    """The engine was closed, or failed, before the request finished."""


class RemoteError(SlipstreamError):
    """A server cannot be reached, or its answers are not OpenAI-compatible."""
