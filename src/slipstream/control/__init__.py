"""What a step costs and what speculation then earns: measured profiles and their arithmetic, without tensors.

In every step `policy` decides which drafter drafts how deep for which request. Afterwards it reports what was
drafted, checked and accepted, and what the parts of the step took. The policy sees no tokens. It keeps a plan for each
load, with and without prompts in the step. `optimise` searches a plan: the most expected tokens over expected time.
`acceptance` counts accepted draft tokens by drafter, task and request, each the prior of the next, and `traffic` keeps
these counts. `cost` learns what steps and drafts take, as sums of parts. One `budget` (`probe_share` of the time)
pays for `trials` of what is not chosen and for `probes` without drafts, which measure what is `realised`;
`stand_back` suspends drafts where they measurably lose. `report` says what is known.
"""
