"""The servers of a cluster: controller, brokers, replicas, coordinators.

Nothing here knows Ray. On Ray, `rayq/runtime/ray/actors.py` puts an actor around each of
`controller.server.ControllerServer`, `broker.broker.Broker` and `replica.replica_host.ReplicaHost`;
`rayq/runtime/local_runtime.py` runs the same classes in one process.
"""
