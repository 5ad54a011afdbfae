"""The OpenAI-compatible server: HTTP requests to an engine, its answers, and metrics.

A body is read and checked, tokenised in a thread of its own, becomes `SamplingParams` in one place and then a `Job`.
`Service.answering` holds a place for it, reads the engine's streams, and aborts them when it is left: because the
client went away, because time is over, or for any other reason. No status is sent before the first update, so every
refusal has its own. Updates go from the engine's thread to the event loop by a mailbox, which gathers those of short
steps. Steps and drafts are counted in the engine's thread, ends and gaps where the updates arrive; the state of queue
and cache is read between two steps.

What a text must obey is decided before: `tools` writes the grammar under which calls come in the model's own format,
and reads them from the text again. `observer` is the one place that passes on what happens: to the metrics, to what the
dashboard shows, and, request by request, to the alarms on acceptance.
"""
