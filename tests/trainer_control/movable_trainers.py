"""Doubles of a trainer's processes: what they were asked, and trainers whose whole state is the steps they took."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_jax import protocols


class Faulty:
    """Makes the n-th call of a method fail, or never end. Shared by all actors of a test."""

    def __init__(self, faults: dict[tuple[str, str, int], BaseException | str] | None = None) -> None:
        self._faults = dict(faults or {})
        self._counts: dict[tuple[str, str], int] = {}
        self.calls: list[tuple[str, str]] = []

    async def meet(self, actor: str, method: str) -> None:
        self.calls.append((actor, method))
        self._counts[actor, method] = number = self._counts.get((actor, method), 0) + 1
        fault = self._faults.get((actor, method, number))
        if fault == "hang":
            await asyncio.Event().wait()
        if isinstance(fault, BaseException):
            raise fault


class Cluster:
    """Actors are objects; a call takes a while. `alive` are those that have not been stopped."""

    def __init__(self, faulty: Faulty) -> None:
        self.faulty = faulty
        self.alive: dict[str, Any] = {}

    async def spawn(self, spec: protocols.ActorSpec) -> protocols.ActorHandle:
        await self.faulty.meet(spec.name, "spawn")
        assert spec.name not in self.alive
        self.alive[spec.name] = Trainer(spec.name, self.faulty, **spec.arguments)
        return protocols.DirectHandle(spec.name, self.alive[spec.name])

    async def stop(self, name: str) -> None:
        actor = self.alive.pop(name, None)
        if actor is not None:
            await self.faulty.meet(name, "stop")

    async def kill(self, name: str) -> None:
        if self.alive.pop(name, None) is not None:
            await self.faulty.meet(name, "kill")

    async def shutdown(self) -> None:
        self.alive.clear()


class Trainer:
    """One process. `taken` are the versions that it trained on, those before its snapshot included."""

    def __init__(self, name: str, faulty: Faulty, process: int, processes: int, step_seconds: float = 1.0) -> None:
        self._name, self._faulty = name, faulty
        self.process, self.processes = process, processes
        self._seconds = step_seconds
        self.taken: list[int] = []
        self.joined = self.exported = ""
        self._saving: tuple[float, Path, str] | None = None
        self._busy = False

    async def _asked(self, method: str, seconds: float = 0.01) -> None:
        assert not self._busy, f"{method}: a trainer takes one call at a time"
        self._busy = True
        try:
            await self._faulty.meet(self._name, method)
            await asyncio.sleep(seconds)
        finally:
            self._busy = False

    async def reserve(self) -> str:
        await self._asked("reserve")
        return f"host:{self._name}"

    async def rows(self) -> list[list[int]]:
        await self._asked("rows")
        return [[0]]

    async def join(self, address: str) -> None:
        await self._asked("join")
        self.joined = address

    async def start(self) -> protocols.TrainerInfo:
        await self._asked("start", 2.0)
        return protocols.TrainerInfo(0, 1, {"data": self.processes}, f"cpu of {self.process}")

    async def stand_by(self) -> protocols.TrainerInfo:
        await self._asked("stand_by", 2.0)
        return protocols.TrainerInfo(0, 1, {"data": self.processes}, "cpu")

    async def shapes(self) -> Sequence[protocols.ProgramShape]:
        await self._asked("shapes")
        return [protocols.ProgramShape("policy", {"tokens": ((8, 16 * (index + 1)), "int32")}) for index in range(2)]

    async def warm(self, shapes: Sequence[protocols.ProgramShape]) -> None:
        assert len(shapes) == 2
        await self._asked("warm", 3.0)

    async def accumulate(self, batch: protocols.TrainBatch) -> None:
        await self._asked("accumulate")

    async def train_step(
        self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()
    ) -> Mapping[str, float]:
        if batch.policy_version != len(self.taken):
            raise protocols.LibraError(
                f"the batch is for {batch.policy_version} and the trainer holds {len(self.taken)}"
            )
        await self._asked("train_step", self._seconds)
        self.taken.append(batch.policy_version)
        return {"loss": float(self.process)}

    async def snapshot(self, path: str) -> protocols.Snapshot:
        await self._asked("snapshot", 0.1)
        self._saving = asyncio.get_running_loop().time() + 2.5, Path(path), json.dumps(self.taken)
        _begin(path)
        return protocols.Snapshot(len(self.taken), 1000)

    def write(self) -> None:
        """What a saving thread does on its own."""
        if self._saving is not None and asyncio.get_running_loop().time() >= self._saving[0]:
            _, path, text = self._saving
            assert path.exists(), "the snapshot was removed while it was written"
            (path / "state.json").write_text(text)
            self._saving = None

    async def snapshot_saved(self) -> bool:
        await self._asked("snapshot_saved")
        self.write()
        return self._saving is None

    async def wait_saved(self) -> None:
        await self._asked("wait_saved")

    async def is_saved(self, path: str) -> bool:
        await self._asked("is_saved")
        return (Path(path) / "state.json").exists()

    async def restore(self, path: str) -> int:
        self.taken = json.loads((Path(path) / "state.json").read_text())
        await self._asked("restore", 1.5)
        return len(self.taken)

    async def policy_version(self) -> int:
        await self._asked("policy_version")
        return len(self.taken)

    async def warm_start_step(self, sequences: Sequence[protocols.Trajectory]) -> Mapping[str, float]:
        await self._asked("warm_start_step")
        return {}

    async def abort_step(self) -> bool:
        return False

    async def listen(self, worker: str, generation: int) -> Mapping[str, Any]:
        return {}

    async def connect(self, worker: str, generation: int, address: Mapping[str, Any]) -> None:
        pass

    async def dismiss(self, worker: str) -> None:
        pass

    async def begin_resize(self, sizes: protocols.MeshSizes) -> protocols.ResizeEstimate:
        raise protocols.LibraError("this trainer moves to other processes only")

    async def resize_progress(self) -> protocols.ResizeProgress:
        raise protocols.ConfigError("no resize is under way")

    async def finish_resize(self, seconds: float) -> protocols.ResizePhases:
        raise protocols.ConfigError("no resize is under way")

    async def cancel_resize(self) -> None:
        pass

    async def open_weights(self, policy_version: int, destinations: Sequence[protocols.WeightDestination] = ()) -> int:
        await self._asked("open_weights")
        return 1

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        await self._asked("stage_weights")
        return protocols.WeightChunk(policy_version, index, 1, (), 0, {"staged by": self.process})

    async def close_weights(self, policy_version: int) -> None:
        await self._asked("close_weights")

    async def save(self, path: str) -> None:
        await self._asked("save")

    async def export(self, path: str) -> None:
        await self._asked("export")
        self.exported = path

    async def shutdown(self) -> None:
        pass


def _begin(path: str) -> None:
    Path(path).mkdir(parents=True)
    (Path(path) / "half").write_text("")


def maker(**arguments: Any) -> Callable[[int, int], protocols.ActorSpec]:
    def make(process: int, processes: int) -> protocols.ActorSpec:
        given = {"process": process, "processes": processes, **arguments}
        return protocols.ActorSpec("named by the set", "movable_trainers:Trainer", given)

    return make
