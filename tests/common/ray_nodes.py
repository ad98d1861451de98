"""A Ray cluster of two nodes on this machine, by Ray's own utility."""

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def two_nodes(cpus: int) -> Iterator[str]:
    """The address of one whose nodes have so many CPUs each, until the end of the block; for a process of its own."""
    from ray import cluster_utils

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets have short names
        # Else it writes the address where every program on the machine looks for one, into a folder it does not make.
        os.environ["RAY_TMPDIR"] = folder
        nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": cpus})
        try:
            nodes.add_node(num_cpus=cpus)
            yield nodes.address
        finally:
            nodes.shutdown()
