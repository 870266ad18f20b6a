"""Chaos on real processes: a Ray cluster of several nodes on this machine, clients at load, and
SIGKILL and SIGSTOP of everything that serves them.

`python -m proving.chaos` (or `make chaos`) steadies, breaks and heals the cluster for minutes,
requires progress while it is broken, and has `rayq.testing.checker` judge the whole history.
"""
