"""Where the processes of a run find each other: a store of addresses, its own for each time that torchrun starts them.

In: the environment that torchrun or `launch` sets. Out: the store for `init_process_group`. torch 2.13 gives the
processes of every attempt the store of the one before: a restarted rank would read addresses at which nobody listens.
"""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist


def store_of_attempt(rank: int, world: int, timeout: datetime.timedelta) -> dist.Store:
    """Collective.

    Args:
        timeout: that processes wait for each other here.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
