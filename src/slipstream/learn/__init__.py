"""The drafter keeps learning from what is served: records of answers, versions of weights, and what decides on them.

One answer's way through the room:

1. `session.LearnSession` hooks into the engine. After each step `capture.capture` takes note of the rows that the
   target checked; when an answer has ended well, and `records.privacy` allows it, it becomes a `records.served` record
   in the ring of `storage`.
2. `background.learner` runs in a process of its own, which `background.learner_process` starts and `background.pace`
   stops while requests need the processor. It reads the ring and has one of `learners` train a candidate.
3. `decisions.judge` holds the candidate against what serves, on answers that nothing was trained on. One that is
   faster is kept as a version in `versions.store`.
4. `decisions.loop` tries the version on a share of the requests, promotes it, watches it, and rolls it back where it
   does not keep its promise. `served_versions` has the drafter hold the versions and says which one drafts for a
   request. The drafter itself, called the base drafter, is never replaced.
5. `decisions.by_hand` is what an operator does with `slipstream learn`: promote, roll back, freeze, forget a tenant.

`status` is what a server shows of all this. Start reading at `session`.
"""
