"""The same log from asyncio: the methods of producer and consumer, as coroutines.

python examples/async_producer.py
"""

from __future__ import annotations

import asyncio

from rayq.testing import LocalCluster

ORDERS = 100


async def sell(cluster: LocalCluster) -> None:
    async with cluster.async_producer() as producer:
        futures = [
            await producer.send("orders", f"order {number}".encode(), key=b"shop-1")
            for number in range(ORDERS)
        ]
        written = await asyncio.gather(*futures)
        # One record, and its delivery, in one call:
        tip = await producer.send_and_wait("orders", b"a tip", key=b"shop-1")
    print(f"sold {len(written)}, the last at offset {written[-1].offset}; a tip at {tip.offset}")


async def ship(cluster: LocalCluster) -> None:
    shipped = 0
    async with cluster.async_consumer("orders", auto_offset_reset="earliest") as consumer:
        async for _record in consumer:
            shipped += 1
            if shipped == ORDERS:
                break
    print(f"shipped {shipped}")


async def main(cluster: LocalCluster) -> None:
    await asyncio.gather(sell(cluster), ship(cluster))


if __name__ == "__main__":
    with LocalCluster(brokers=3) as cluster:
        cluster.create_topic("orders", partitions=1)
        asyncio.run(main(cluster))
