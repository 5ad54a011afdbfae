"""Keys and values: accounting without tensors, the pool that holds them.

One pool has one slot a token and is sized at start. A forward pass writes its rows behind the valid entries; `commit`
gathers the entries of the accepted nodes to the front, and the next pass overwrites the rest. Entries of rejected nodes
are never read. Entries are rounded to `kv_cache_dtype` once, when a row writes them, and every row, that one included,
reads what was rounded: so a row's bits are a function of its text alone, however its prompt was cut and whatever was
drafted.

A finished sequence's segment is *retained* and evicted, least recently used first, when room is needed. A later prompt
of the same tenant that begins with the same tokens takes it over or copies the common part. Prefixes are found by
hashes of 16-token blocks and then compared token by token, so a hash collision costs time, not correctness.
`Sequence.entry_ids` are compared: with `fast_prompts` a token of a prompt makes another entry than the same token of an
answer, and has another id. Segments with copies of the same entries know how many they share: no memory is saved, but
the native kernels read them once a pass.

A recurrent layer has no entries but a state (`state`), which the rows of a pass enter in the order of a `walk`.
Prefixes are then reused only where a copy of it was kept (`checkpoints`).
"""
