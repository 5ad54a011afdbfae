"""Errors that Slipstream raises on purpose. Each message says what is wrong and what would be right.

SlipstreamError
├── ConfigError             an unknown key or a bad value in a configuration
├── RequestError            an invalid prompt or sampling parameter
├── ModelError              a checkpoint that cannot be loaded
│   ├── UnsupportedModelError       an architecture that cannot be decoded exactly here
│   └── VocabularyMismatchError     a draft whose tokens are not the target's
├── CapacityError           something that does not fit into the planned memory
├── EngineStoppedError      the engine was closed, or failed, while a request was running
├── EngineBusyError         an engine in another process has more requests than it has read
├── ProtocolError           two processes do not understand each other
├── RemoteError             a remote server that cannot be reached or gives no valid answer
├── DeployError             a cluster or a replica that cannot be used
│   └── OverloadedError     a request that the replicas cannot take in time
└── LearnError              what the drafter learns from or has learned cannot be used
    ├── CorruptRecordError      a record of a served answer that is not as it was written
    ├── RecordTooLargeError     a served answer that is too large for the ring
    └── CorruptVersionError     a version of weights that is not as it was written
"""


class SlipstreamError(Exception):
    """Base of all errors raised on purpose; its message can be shown to a user."""


class ConfigError(SlipstreamError, ValueError):
    """A configuration has an unknown key or a value out of range."""


class RequestError(SlipstreamError, ValueError):
    """A prompt or a sampling parameter is invalid."""


class PredictionError(RequestError):
    """What a request expects as its answer cannot be read, or is too long for the model."""


class ReasoningError(RequestError):
    """A request asks for step-level speculation wrongly, or of an engine that does not have or allow it."""


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


class EngineBusyError(SlipstreamError):
    """More requests are on their way to the engine's process than may be; try again."""


class ProtocolError(SlipstreamError):
    """Two processes do not understand each other: what came is no message of theirs, or of another version."""


class RemoteError(SlipstreamError):
    """A server cannot be reached, or its answers are not OpenAI-compatible."""


class DeployError(SlipstreamError):
    """A cluster or a replica cannot be used: not there, of another model, of another protocol."""


class OverloadedError(DeployError):
    """The replicas cannot take a request, or not in time; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: int, is_deadline: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_deadline = is_deadline


class LearnError(SlipstreamError):
    """What the drafter learns from, or has learned, cannot be used: not there, not writable, of another model."""


class CorruptRecordError(LearnError):
    """The record of a served answer is not as it was written."""


class RecordTooLargeError(LearnError):
    """One served answer is larger than the part of a ring that a record may take; the next one may fit."""


class CorruptVersionError(LearnError):
    """A version of a drafter's weights is not as it was written."""
