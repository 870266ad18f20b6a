"""The error for objects that cannot be sent to another process."""

from __future__ import annotations


def no_pickle_error(made: object, what: str) -> TypeError:
    """The error for an object that a cluster has made. `what` names it, such as "a producer"."""
    return TypeError(
        f"{type(made).__name__} cannot be sent to another process (a Ray task, for example): send "
        f"the Cluster, and make {what} from it there."
    )
