"""Step-level speculation: how a step of thinking is delimited, drafted, judged and logged. Lossy, and only on request.

The idea is that of Pan et al., "SpecReason: fast and accurate inference-time compute via speculative reasoning"
(NeurIPS 2025): a small model writes whole steps and the target keeps those that it finds good. A step that is kept for
its meaning is not what the target would have written, so the text changes. Everything outside of this room stays exact.
"""
