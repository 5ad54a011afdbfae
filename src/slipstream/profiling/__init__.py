"""What passes cost on this machine, and the roofline times below which they cannot go.

`pass_times` times real passes by rows and context, in turns with readings of what the device can do (`limits`). The
result, a `profile.CostProfile`, has no tensors: it answers `step_s(rows, context)` by interpolation. `store` keeps it
in the user's cache folder under a key of everything that a pass's time depends on.
"""
