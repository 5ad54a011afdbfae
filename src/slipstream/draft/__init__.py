"""Drafters: one file each, in a room by how they draft.

`base.Drafter` is the contract; `registry` finds classes by name, built-in or from entry points, and parses their
options. A drafter keeps what it needs by sequence id, learns from `observe`, and forgets at `release`.

- Models and heads grow the proposals of all sequences together, as chains, fixed trees or dynamic trees
  (`proposers.draft_tree`). All committed tokens that a drafter has no entries of are fed before its first draft token,
  so full acceptance, a prompt and a stretch without speculation need no special case.
- A head that reads the target's hidden states names the layers. The engine keeps them in the target's pool, a slot a
  token, so prefix reuse, moves and preemption need nothing more.
- `observe` carries the raw logits behind every checked node: `token_recycling` keeps the best tokens of every row, and
  `lookahead` runs its Jacobi window as branches of its proposal.
- A draft model with another tokenizer reads the committed text in its own tokens: `text.token_bytes` compares
  vocabularies by the bytes that tokens say, and the last few tokens of a growing text are encoded again.
- An ensemble unites its members' trees, and each member observes its own nodes only. A cascade's draft model checks an
  inner drafter's tokens by equality, since a draft token is a function of its logits and of noise that is keyed by
  position, and rolls the inner drafter back by `rewind`.
- `auto` knows three kinds: chains, whose depth is chosen; lookups, which are called first, because they are quick, and
  used where their draft is long; and all others, which are used as they are or not at all.
- Drafters of other packages are called in a thread of their own and get copies only, so one that never returns delays
  nothing, and what it still writes changes nothing. A late drafter is used again after a pause, with an empty state.
- A drafter that remembers other requests says so, and the classical verifiers then use random numbers that no seed
  repeats.
"""
