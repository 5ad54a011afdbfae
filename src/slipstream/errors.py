"""Every error Slipstream raises on purpose. Each message says what was wrong and what would be right.

SlipstreamError
├── ConfigError             an unknown key or a bad value in a configuration
├── RequestError            a prompt or a sampling parameter that cannot be served
├── ModelError              a checkpoint that cannot be loaded
│   ├── UnsupportedModelError       an architecture that cannot be decoded exactly here
│   └── VocabularyMismatchError     a draft whose tokens are not the target's
├── CapacityError           something that does not fit into the memory that was planned
├── EngineStoppedError      the engine was closed, or failed, while a request was under way
└── RemoteError             a server that is to be measured cannot be reached, or answers nothing
"""


class SlipstreamError(Exception):
    """Base of all errors raised on purpose; its text is fit to be shown to a user."""


class ConfigError(SlipstreamError, ValueError):
    """A configuration has an unknown key or a value out of range."""


class RequestError(SlipstreamError, ValueError):
    """A prompt or a sampling parameter cannot be served."""


class ModelError(SlipstreamError):
    """A checkpoint cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The architecture cannot be decoded exactly with this engine."""


class VocabularyMismatchError(ModelError):
    """The draft's token ids do not mean what the target's mean."""


class CapacityError(SlipstreamError):
    """Something does not fit into the planned memory."""


class EngineStoppedError(SlipstreamError):
    """The engine was closed, or failed, before the request was through."""


class RemoteError(SlipstreamError):
    """A server cannot be reached, or does not answer as an OpenAI-compatible one."""
