"""Waits until a number of hosts have joined the Ray of this host: `python await_hosts.py HOSTS [SECONDS]`.

Nodes with accelerators may be made only now, minutes apart; the driver's own deadlines assume existing hosts.
"""

import logging
import sys
import time

import ray

SECONDS, LOOK_SECONDS = 1800.0, 1.0

wanted = int(sys.argv[1])
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
deadline = time.monotonic() + seconds
ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
while (joined := sum(node["Alive"] for node in ray.nodes()) - 1) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"{joined} of {wanted} hosts joined within {seconds:g} s; see the others' logs or kubectl get pods")
    time.sleep(LOOK_SECONDS)
