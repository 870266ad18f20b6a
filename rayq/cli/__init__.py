"""The `rayq` command. Needs the extra `cli`: `pip install 'rayq[cli]'`.

Exit codes: 0 well, 1 an error (one line on stderr), 2 a wrong use of the command, 3 the cluster (or
a data directory) is not healthy, 130 interrupted, 141 the output's reader is gone, 143 terminated.
"""
