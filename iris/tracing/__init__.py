"""Traces: the events that kernels of all ranks have recorded (`iris.language.tracing`), shown on one clock.

1. Record. `recording` is ``ctx.tracing``: it switches recording on, and reads a rank's events from its device into a
   `rank_recording`. `rail_times` notes when hosts exchanged data.
2. Compare clocks. `clock` compares those of the ranks of a host, `host_clocks` those of hosts.
3. Gather. `between_hosts` sends recordings to the ranks of a context, `between_nodes` to ``python -m iris trace``.
4. Put together. `timeline` has the events of all ranks, and a flow from each signal to the wait that it ended. For that
   `common_clock` converts all times to one clock.
5. Show. `chrome` writes a file for Perfetto, `summary` prints tables, `picture` draws. `command` is
   ``python -m iris trace``.
"""
