"""What cannot leave its process says what can."""

from __future__ import annotations


def no_pickle_error(made: object, what: str) -> TypeError:
    """Of what a cluster has made: `what` is it, such as "a producer"."""
    return TypeError(
        f"{type(made).__name__} cannot be sent to another process (a Ray task, for example): send "
        f"the Cluster, and make {what} from it there."
    )
