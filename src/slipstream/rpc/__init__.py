"""How processes are started and spoken to: one form of frames, one codec, one way to start a child.

A stream is cut into messages by `frames`: each one's length comes before it, and a bound is checked before anything
is read. `codec` makes typed structures of them with msgspec, so that bytes from outside become values of known types
and never code. `sockets` and `peer` move frames, the first with a loop of one's own, the second in asyncio; both
bound what the other side leaves unread. `children` starts processes and says how they ended. The protocols themselves
stand with those who speak them: `serve.process` (engine), `deploy` (replicas), `draft.remote` (draft workers),
`sampling.grammars` (trials of grammars), `learn.background` (the learner).

`client` is apart from all that: it speaks HTTP to servers with OpenAI's interface, and times their answers.
"""
