"""A training side in a process of its own, as a script: calls come in over a connection, one at a time.

Run as `python training_side_process.py FD`. The first message is (config, name), each later one (method,
arguments); the answers are (value, None) or (None, the error's sentence).
"""

import os
import sys
from multiprocessing import connection

from libra_jax import protocols
from libra_jax.training import training_side
from libra_jax.utils import parent_death


def main(calls):
    parent_death.die_with_parent(os.getppid())
    config, name = calls.recv()
    actor = training_side.create(config, workdir="unused", name=name)
    while True:
        try:
            method, arguments = calls.recv()
        except EOFError:
            return
        try:
            calls.send((getattr(actor, method)(*arguments), None))
        except protocols.LibraError as error:
            calls.send((None, str(error)))


if __name__ == "__main__":
    main(connection.Connection(int(sys.argv[1])))
