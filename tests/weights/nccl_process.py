"""Weight syncs by nccl's path with gloo in NCCL's place, as far as it goes without CUDA: `python nccl_process.py PORT`.

Five processes, forked from this one because the imports are slow: two of a trainer, JAX processes with four CPU devices
each; two workers of the instance "a", and one of "b". A worker is vLLM's receiving engine with a model that only keeps.
Two syncs: one to both instances, and one to "b" alone in its next life. Prints a line of JSON for each worker and sync:
[worker, number of loads, names of the tensors that are not the parameters].
"""

import json
import multiprocessing
import os
import sys
import types

import gathering_process
import gloo_for_nccl
import numpy as np
import torch

from libra_jax import protocols
from libra_jax.engines import vllm_weight_sender, vllm_weights

SYNCS = [
    [protocols.WeightDestination("a", 2, 0), protocols.WeightDestination("b", 1, 0)],
    [protocols.WeightDestination("b", 1, 1)],
]


def trainer(pipe, rank: int, port: int) -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    import jax

    from libra_jax.weights import device_snapshot

    assert vllm_weight_sender.__name__ == device_snapshot.SENDER
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    params = gathering_process.sharded()
    made = device_snapshot.DeviceSnapshot(gathering_process.SHAPE, "bfloat16", "nccl", 240.0, "127.0.0.1")
    for version, destinations in enumerate(SYNCS):
        made.open(version, params, destinations)
        pipe.send(made.stage(version, 0).transport["instances"])
        made.close(version)
    made.shutdown()


class Model(torch.nn.Module):
    """Keeps what it is given."""

    def load_weights(self, weights) -> None:
        self.loads.append({name: tensor.float().numpy() for name, tensor in weights})


def worker(pipe, rank: int) -> None:
    model = Model()
    parallel = types.SimpleNamespace(rank=rank, data_parallel_index=0, world_size=1)
    settings = types.SimpleNamespace(parallel_config=parallel, model_config=None)
    engine = vllm_weights.NcclWeightTransferEngine(None, settings, torch.device("cpu"), model)
    joined = None
    while True:
        address = pipe.recv()
        if address["init_info"] != joined:  # as `VllmEngine.update_weights` does
            joined = address["init_info"]
            engine.init_transfer_engine(engine.parse_init_info(joined))
        model.loads = []
        engine.receive_weights(engine.parse_update_info(address["update_info"]))
        found = {name: value for load in model.loads for name, value in load.items()}
        wrong = [
            name
            for name, entry in gathering_process.ENTRIES.items()
            if name not in found or not np.array_equal(found[name], gathering_process.value(entry))
        ]
        pipe.send([len(model.loads), wrong + sorted(set(found) - set(gathering_process.ENTRIES))])


def main(port: int) -> None:
    gloo_for_nccl.install()
    context = multiprocessing.get_context("fork")

    def start(target, *arguments):
        ours, theirs = context.Pipe()
        context.Process(target=target, args=(theirs, *arguments), daemon=True).start()
        return ours

    first, second = (start(trainer, rank, port) for rank in range(2))
    workers = {(name, rank): start(worker, rank) for name, rank in (("a", 0), ("a", 1), ("b", 0))}
    for destinations in SYNCS:
        addresses, _ = first.recv(), second.recv()
        receiving = {key: pipe for key, pipe in workers.items() if key[0] in {each.name for each in destinations}}
        for (name, _), pipe in receiving.items():
            pipe.send(addresses[name])
        for (name, rank), pipe in receiving.items():
            print(json.dumps([f"{name}{rank}", *pipe.recv()]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
