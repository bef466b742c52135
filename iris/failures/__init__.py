"""What happens when a kernel, a wait or a rank fails.

`device_record` is how a kernel reports an error to the host, and `barrier_diagnosis` words one of these errors. The
others end this process where it would wait for ever: `peer_loss` when a rank has died, `differing_calls` when ranks of
several hosts have made differing calls, both by `process_end`.
"""
