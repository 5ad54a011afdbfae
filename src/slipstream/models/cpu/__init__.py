"""The CPU kernels and what calls them.

Two things call for kernels of our own (`kernels/`, C++ without dependencies). A check of five draft tokens must cost
about one token, and a step little more than reading its weights: no operator of PyTorch gives both, and the operators
between the linear layers cost a small model more than its arithmetic. And a row's result must not depend on the rows
next to it: libraries choose their kernels by the number of rows, ours add up every output in one fixed order.

What makes the bits the same on every processor, and in any batch of rows:

- Every sum over lanes is taken in sixteen of them (`wide` of `vectors.h`), in one, two or four registers, and folded by
  halves. What is left behind the last sixteen is added one by one. An output of a linear layer is one chain of fused
  multiply-adds over its inputs, or an exact integer sum.
- A product and a sum are rounded once only where the source says `fused`; `-ffp-contract=off` keeps the compiler from
  joining others. Where a processor has no such instruction, `std::fma` computes it.
- Sines, cosines and exponentials are polynomials of our own; division and square root are IEEE's. Frequencies of rotary
  embeddings are computed anew from the configuration, their powers in float64.
- Attention numbers the entries that a row sees in their logical order, so a node of a tree adds up what the same text
  without a tree adds up. Entries are taken in partitions of 256, whose sums are merged in order: threads may share one
  long context, and rows that see the same entries read them once. What a thread keeps of partitions is at most 4 MiB,
  and all room is had before they start: where there is none the pass raises `MemoryError`, and the next one runs.
- A state of a recurrent layer is computed token by token, each of its columns by itself, in four sums over its rows.
- Of a mixture of experts, what a row chooses, and the order in which its experts' results are added, depend on that row
  alone.

The executor `models.executor.cpu_kernels` takes over models of the `families`, which differ in fields of one
computation; other models run layer by layer. Heads of such targets run here too, and so do whole draft chains of
requests without penalties, biases, masks, grammars or `probabilistic` drafts, and without trees.
"""
