"""The typed messages of the protocol: one struct for each request and each answer, in the file of
the server that answers.

A request class declares its number on the wire and its answer. Both are encoded as msgpack arrays:
the order of the fields is the format, so append fields with a default, and never reorder. Record
batches and metadata records travel beside the message as the frame's raw payload, never inside it.

An answer may also be an error: `(code, message)` of `rayq.errors`, marked by a flag of the frame.

Topics are named by id (a UUID in hex), so that a topic that is deleted and created again is another
topic. A *client* holds the cluster's secret or a token; a *server* is a rayq process.
"""

from rayq.messages.access import *
from rayq.messages.any_broker import *
from rayq.messages.audit import *
from rayq.messages.base import *
from rayq.messages.controller import *
from rayq.messages.group_coordinator import *
from rayq.messages.limits import *
from rayq.messages.objects import *
from rayq.messages.partition_leader import *
from rayq.messages.queues import *
from rayq.messages.quotas import *
from rayq.messages.replicas import *
from rayq.messages.transactions import *
from rayq.messages.voters import *
