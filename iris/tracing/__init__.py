"""Traces: what kernels recorded (`iris.language.tracing`), of all ranks on one clock.

`recording` is ``ctx.tracing``, and takes a rank's events from its device; `clock` compares the ranks' clocks, and
`host_clocks` those of hosts; `rail_times` notes when these exchanged data, and `between_hosts` brings their recordings;
`common_clock` finds how the times of all contexts get on one clock, and `timeline` puts the ranks together, with a flow
from each signal to the wait that it ended; `chrome`, `summary` and `picture` show that to Perfetto, in a terminal and
on paper; `command` is ``python -m iris trace``, to which `between_nodes` has the recordings of other nodes come.
"""
