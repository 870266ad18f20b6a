"""Config names of Kafka's clients (its own, librdkafka, kafka-python), and the words of rayq.

They are for hints only: rayq accepts no config under these names, since a program should not have
two spellings.
"""

from __future__ import annotations

_CONNECT = 'the address is given once: rayq.connect("host:9392"), and the cluster makes the rest'
_SERIALIZERS = "say value_serializer= and key_serializer= to cluster.producer"
_DESERIALIZERS = "say value_deserializer= and key_deserializer= to cluster.consumer"
_HANDLERS = "a pool's handler gets the bytes: decode them there"
_NO_CLIENT_ID = "there is none: servers see the client's host and process"
_TLS = "over TLS give tls_ca= (and tls_certificate=, tls_key=) to rayq.connect, and token="
_PARTITIONS = "say partitions= to create_topic"
_REPLICATION = "say replication_factor= to create_topic"
_REPLICATION_LATER = "later set_replication_factor, or `rayq topic set-replication-factor`"

_EVERYWHERE = {
    "bootstrap_servers": _CONNECT,
    "bootstrap_server": _CONNECT,
    "metadata_broker_list": _CONNECT,
    "brokers_list": _CONNECT,
    "client_id": _NO_CLIENT_ID,
    "serializer": _SERIALIZERS,
    "deserializer": _DESERIALIZERS,
    "schema_registry_url": "there is no schema registry",
    "security_protocol": _TLS,
    "ssl_context": _TLS,
    "ssl_cafile": "say tls_ca= to rayq.connect",
    "ssl_ca_location": "say tls_ca= to rayq.connect",
    "ssl_certfile": "say tls_certificate= to rayq.connect",
    "ssl_certificate_location": "say tls_certificate= to rayq.connect",
    "ssl_keyfile": "say tls_key= to rayq.connect",
    "ssl_key_location": "say tls_key= to rayq.connect",
    "ssl_check_hostname": "say tls_check_hostname= to rayq.connect",
    "sasl_mechanism": "say token= to rayq.connect",
    "sasl_plain_username": "say token= to rayq.connect",
    "sasl_plain_password": "say token= to rayq.connect",
    "sasl_username": "say token= to rayq.connect",
    "sasl_password": "say token= to rayq.connect",
    "timeout": "say timeout_s=, in seconds",
    "timeout_ms": "say timeout_s=, in seconds",
}

_TOPIC = {
    "num_partitions": _PARTITIONS,
    "partition_count": _PARTITIONS,
    "partitions": f"{_PARTITIONS}; create_partitions adds more",
    "replication": _REPLICATION,
    "replicas": _REPLICATION,
    "num_replicas": _REPLICATION,
    "replication_factor": f"{_REPLICATION}; {_REPLICATION_LATER}",
    "topic_configs": "say each key as a keyword, such as retention_ms=86_400_000",
    "configs": "say each key as a keyword, such as retention_ms=86_400_000",
    "config": "say each key as a keyword, such as retention_ms=86_400_000",
    "min_isr": "say min_insync_replicas=",
    "min_insync": "say min_insync_replicas=",
    "unclean_leader_election_enable": "say unclean_leader_election=",
    "message_max_bytes": "say max_message_bytes=",
    "max_request_size": "say max_message_bytes=",
    "compression_type": "the producer chooses: cluster.producer(compression_type=...)",
    "log_retention_ms": "say retention_ms=",
    "log_retention_hours": "say retention_ms=",
    "retention_hours": "say retention_ms=",
    "log_retention_bytes": "say retention_bytes=",
    "log_segment_bytes": "say segment_bytes=",
    "log_cleanup_policy": "say cleanup_policy=",
    "flush_messages": 'say flush="disk" (before every acknowledgement) or flush="os"',
    "flush_ms": 'say flush="disk" (before every acknowledgement) or flush="os"',
    "message_timestamp_difference_max_ms": "say message_timestamp_after_max_ms=",
    "remote_storage_enable": "say remote_storage=",
    "remote_log_copy_disable": 'say remote_storage="read"',
    "remote_log_delete_on_disable": "say delete_remote=True to alter_topic_config",
    "retention_local_target_ms": "say local_retention_ms=",
    "retention_local_target_bytes": "say local_retention_bytes=",
    "redpanda_remote_write": "say remote_storage=",
    "redpanda_remote_read": "say remote_storage=",
}

_CLUSTER = {
    "replication_factor": f"each topic has its own: {_REPLICATION}",
    "default_replication_factor": f"each topic has its own: {_REPLICATION}",
    "partitions": f"each topic has its own number: {_PARTITIONS}",
    "num_partitions": f"each topic has its own number: {_PARTITIONS}",
    "num_brokers": "say brokers=",
    "broker_count": "say brokers=",
    "broker_id": "brokers number themselves",
    "node_id": "brokers number themselves",
    "num_nodes": "say nodes=",
    "cluster_name": "say name=",
    "log_dir": "the directory comes first: rayq.start(path)",
    "log_dirs": "the directory comes first: rayq.start(path)",
    "data_dir": "the directory comes first: rayq.start(path)",
    "host": "say bind_host= (rayq.start), or rayq.connect(address)",
    "listeners": "say bind_host= and port=",
    "advertised_listeners": "say advertised_host=",
    "zookeeper_connect": "there is no ZooKeeper",
    "broker_session_timeout_ms": "say session_timeout_ms=",
    "transaction_state_log_num_partitions": "say transaction_state_partitions=",
    "remote_log_storage_system_enable": "say remote_storage_url=",
    "remote_log_manager_copy_max_bytes_per_second": "say remote_upload_bytes_per_s=",
    "remote_log_manager_fetch_max_bytes_per_second": "say remote_read_bytes_per_s=",
    "cloud_storage_cache_size": "say remote_cache_bytes=",
    "cloud_storage_bucket": "say remote_storage_url=, such as s3://bucket/prefix",
}

_PRODUCER = {
    "isolation_level": "say isolation_level= to cluster.consumer",
    "topic": "the topic is named by `send`",
    "retries": "say delivery_timeout_ms=: retries continue for that time",
    "message_timeout_ms": "say delivery_timeout_ms=",
    "message_send_max_retries": "say delivery_timeout_ms=: retries continue for that time",
    "compression": "say compression_type=",
    "compression_codec": "say compression_type=",
    "request_required_acks": "say acks=",
    "batch_bytes": "say batch_size=",
    "batch_num_messages": "say batch_size=, in bytes",
    "linger": "say linger_ms=",
    "queue_buffering_max_ms": "say linger_ms=",
    "queue_buffering_max_kbytes": "say buffer_memory=, in bytes",
    "queue_buffering_max_messages": "say buffer_memory=, in bytes",
    "idempotence": "say enable_idempotence=",
    "max_in_flight": "say max_in_flight_requests_per_connection=",
    "max_request_size": "it is a topic's: create_topic(max_message_bytes=...)",
    "retry_backoff_max_ms": "say retry_backoff_ms=",
}

_CONSUMER = {
    "transactional_id": "say transactional_id= to cluster.producer",
    "group_id": "say group=",
    "group_name": "say group=",
    "consumer_group": "say group=",
    "topic": 'topics come first: consumer("flights", ...)',
    "topics": 'topics come first: consumer("flights", "delays", ...)',
    "session_timeout_ms": "say group_session_timeout_ms=",
    "heartbeat_interval_ms": "say group_heartbeat_interval_ms=",
    "partition_assignment_strategy": "say assignor=",
    "group_remote_assignor": "say assignor=",
    "max_partition_fetch_bytes": "say fetch_max_bytes=",
    "fetch_message_max_bytes": "say fetch_max_bytes=",
    "fetch_min_bytes": "a fetch is answered with the first record; say fetch_max_wait_ms=",
    "fetch_wait_max_ms": "say fetch_max_wait_ms=",
    "consumer_timeout_ms": "say poll(timeout_s=...)",
    "auto_commit": "say enable_auto_commit=",
    "auto_commit_enable": "say enable_auto_commit=",
    "max_records": "say max_poll_records=, or poll(max_records=...)",
    "offset_reset": "say auto_offset_reset=",
    "auto_offset_store": "say enable_auto_commit=",
    "enable_auto_offset_store": "say enable_auto_commit=",
    "subscribe": "topics come first, or say pattern=",
}

_POOL = {
    "group_id": "the group comes second: consumer_pool(topic, group, handle)",
    "consumer_group": "the group comes second: consumer_pool(topic, group, handle)",
    "session_timeout_ms": "say group_session_timeout_ms=",
    "max_poll_records": "say max_records=",
    "offset_reset": "say auto_offset_reset=",
    "enable_auto_commit": "a pool commits by itself what was handled",
    "concurrency": "say max_consumers=",
    "dead_letter_queue": "say dead_letter_topic=",
    "deserializer": _HANDLERS,
    "value_deserializer": _HANDLERS,
    "key_deserializer": _HANDLERS,
}

_QUEUE = {
    "share_record_lock_duration_ms": "say visibility_timeout_s=",
    "ack_timeout_ms": "say visibility_timeout_s=",
    "share_delivery_count_limit": "say max_deliveries=",
    "max_receive_count": "say max_deliveries=",
    "max_redeliver_count": "say max_deliveries=",
    "max_retries": "say max_deliveries=, which counts the first delivery, too",
    "retries": "say max_deliveries=, which counts the first delivery, too",
    "retry_backoff": "say backoff_s=",
    "retry_backoff_max": "say backoff_max_s=",
    "dead_letter_queue": 'say dead_letters="keep": they go to the queue <name>.dead',
    "dead_letter_topic": 'say dead_letters="keep": they go to the topic <name>.dead',
    "auto_offset_reset": "say start=",
    "share_auto_offset_reset": "say start=",
}

_BY_KIND = {
    "topic": _TOPIC,
    "cluster": _CLUSTER,
    "producer": _PRODUCER,
    "consumer": _CONSUMER,
    "pool": _POOL,
    "queue": _QUEUE,
}


def said_here(kind: str, name: str) -> str | None:
    """The hint to give for `name` (with underscores) in a config of this kind ("topic", "cluster",
    "producer", "consumer", "pool", "queue"). None for a name that Kafka does not use either."""
    return _BY_KIND[kind].get(name) or _EVERYWHERE.get(name)
