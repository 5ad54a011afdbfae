"""The loop: plan, propose, forward, verify, commit.

`Engine.add_request` checks the prompt, the parameters and the options before any work is done, and copies them. It
compiles the grammar if there is one, draws a seed if none was given, makes a `Sequence` for each of the `n` answers
(from the second on they wait for the first one's prompt, to reuse it) and queues them. `Engine.step` then runs until
nothing is left:

1. plan: the scheduler admits sequences, preempts and pauses others, and gives each decoding sequence a draft budget:
   no more tokens than can still be emitted, fit the context, or are its share of the spare rows.
2. propose: the policy says which drafter drafts how deep for which sequence. A drafter that raises, breaks its
   contract or has logits that are not finite is retired for the sequences that it fails, which decode without drafts.
   Under a grammar a proposal loses the tokens that the grammar refuses and gains those that it forces.
3. forward: all rows are one pass. Logits are computed only for rows that decide a token.
4. verify: logits are processed row by row, where penalties and the grammar see the path to the node. The verifier, a
   pure function, returns the accepted nodes and the target's own next token.
5. commit: tokens go through the stop rules one by one, so a stop inside an accepted block cuts there. The cache keeps
   the entries of the accepted path. Metrics are counted, drafter and policy observe, finished sequences free what they
   hold.
6. call back: `on_update` is called last, when the engine's state is consistent, so it may add or abort requests. One
   that raises harms no other request; its exception leaves `step` after all of them have run.

`Engine.abort` ends a request between two steps. When nothing runs, nothing is held: `Engine.integrity` lists violated
invariants.
"""
