"""A replica's end of a gradient channel, as a process of its own that goes wrong in one way.

Run as `python gradient_channel_peer.py MODE ADDRESS PART_BYTES`. It prints "connected" (or "announced") and then:
  sends: sends two sums, of versions 3 and 4, and waits to be told to end;
  silent: sends nothing until it is killed;
  dies_in_header: sends half a header, and kills itself;
  dies_in_message: sends a header and one message of the arrays, and kills itself;
  announced: has come to the meeting, and never connects.
"""

import datetime
import json
import os
import signal
import sys

import numpy as np
import torch
from torch import distributed

from libra_jax.utils import parent_death
from libra_jax.weights import gradient_channel

HEADER = gradient_channel.Header("r", 7, 3, "d", 0, 1, {"entropy": (1.5, 2.0)}, {"ratio": 1.25})


def arrays(version):
    return [np.arange(1000, dtype=np.float32) + version, np.array(version, np.float32)]


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def main(mode, address, part_bytes):
    parent_death.die_with_parent(os.getppid())
    gradient_channel.PART_BYTES = part_bytes
    rank = address["ranks"] - 1
    if mode == "announced":
        seconds = datetime.timedelta(seconds=20)
        store = distributed.TCPStore(
            address["host"], address["port"], is_master=False, timeout=seconds, wait_for_workers=False
        )
        store.set(f"rank {rank}", "here")
        print("announced", flush=True)
        sys.stdin.readline()
        return
    channel = gradient_channel.Channel(address, rank, 20)
    channel.wait(20)
    print("connected", flush=True)
    if mode == "sends":
        for version in (3, 4):
            header = gradient_channel.Header(**{**vars(HEADER), "version": version})
            channel.send(header, arrays(version), 20)
    elif mode == "dies_in_message":
        kinds = [(str(array.dtype), array.shape) for array in arrays(3)]
        head = torch.from_numpy(gradient_channel._encode(HEADER, kinds))
        channel._group.send([head], 0, head.nbytes).wait()
        part = torch.zeros(part_bytes, dtype=torch.uint8)
        channel._group.send([part], 0, part.nbytes).wait()
        _die()
    elif mode == "dies_in_header":
        channel._group.send([torch.zeros(gradient_channel.HEADER_BYTES // 2, dtype=torch.uint8)], 0, 0)
        _die()
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
