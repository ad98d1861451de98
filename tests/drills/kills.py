"""kill -9 of every kind of actor, and of whole hosts, each in a run of its own at a random moment."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from libra_jax import protocols
from libra_jax.cluster import emulated
from tests.drills import blows, clusters, judging, processes, runs, settings

SEARCH_SECONDS = 20.0
"""How long a victim is looked for: sandboxes come and go."""

SETTLED_SECONDS = 0.5
"""After so long, with the driver held still, sandboxes that were being started have been and those being ended are."""

ENGINE_CORE = "engine core"

_LOST_TRAINER = r"trainer(\.\d)?\b.*(is lost|was lost|died|ended|cannot be reached)"
_LOST_ENGINE = r"Engine rollout-\d was lost"
_LOST_DRIVER = r"DEAD|Going on from the checkpoint"


@dataclass(frozen=True)
class Kind:
    """What may be killed.

    Attributes:
      name: of the kind.
      layout: of `settings`, of the run that it is killed in.
      expected: a regular expression that a sentence of the log has to match.
      strike: kills one; given the scene, it returns what it has killed.
    """

    name: str
    layout: str
    expected: str
    strike: Callable[[Scene], str]


@dataclass
class Scene:
    """A run under way.

    Attributes:
      run: the run.
      hosts: that it is on.
      family: its processes, and those of the hosts.
      rng: chooses victims.
      layout: of the run, of `settings`.
      headless: the driver was hit, or what it cannot do without: Ray on its host.
    """

    run: runs.Run
    hosts: emulated.EmulatedHosts
    family: processes.Family
    rng: random.Random
    layout: str
    headless: bool = False

    def find(self, look: Callable[[], Sequence[psutil.Process]], what: str) -> psutil.Process:
        """One of the processes that a look finds.

        Raises:
          Stuck: there is none.
        """
        deadline = time.monotonic() + SEARCH_SECONDS
        while not (found := sorted(look(), key=lambda process: process.pid)):
            if time.monotonic() > deadline:
                raise runs.Stuck(f"there is no {what} to kill; see {self.run.log}")
        return self.rng.choice(found)

    def kill_actor(self, *names: str) -> str:
        """Kills one of the actors of these names."""
        name = self.rng.choice(names)
        victim = self.find(lambda: processes.actors(self.family.alive(), name), name)
        victim.kill()
        return f"{name} (process {victim.pid})"

    def kill_core(self) -> str:
        """Kills vLLM's own process, below an engine's actor."""
        found = lambda: [process for process in self.family.alive() if "EngineCore" in processes.name(process)]  # noqa: E731
        victim = self.find(found, "core process of vLLM")
        victim.kill()
        return f"the core process of rollout-0 (process {victim.pid})"

    def kill_sandbox(self) -> str:
        """Kills a sandbox, or one that is kept ready, below the driver.

        Held still meanwhile, the driver starts and ends none: whose death would be no one's loss is not hit.
        """
        driver = psutil.Process(self.run.process.pid)
        deadline = time.monotonic() + SEARCH_SECONDS
        while time.monotonic() < deadline:
            driver.suspend()
            try:
                time.sleep(SETTLED_SECONDS)
                if found := [process for process in driver.children(recursive=True) if _is_whole_sandbox(process)]:
                    victim = self.rng.choice(sorted(found, key=lambda process: process.pid))
                    victim.kill()
                    return f"a sandbox (process {victim.pid})"
            finally:
                driver.resume()
            time.sleep(SETTLED_SECONDS)
        raise runs.Stuck(f"there is no sandbox to kill; see {self.run.log}")

    def kill_driver(self) -> str:
        """Kills the run's own process, which has the coordinator."""
        self.headless = True
        self.run.process.kill()
        return f"the driver (process {self.run.process.pid})"

    def kill_host(self, training: bool) -> str:
        """Cuts the power of a host that trains or that rolls out; not that of the driver."""
        nodes = [host["node"] for host in self.run.hosts()]
        count = settings.TRAINING_HOSTS[self.layout]
        node = self.rng.choice([node for node in (nodes[:count] if training else nodes[count:]) if node != "host-0"])
        self.hosts.kill(int(node.removeprefix("host-")))
        return f"{node}, which {'trains' if training else 'rolls out'}"

    def kill_head(self) -> str:
        """Cuts the power of the driver's host, which is Ray's head."""
        self.headless = True
        self.run.process.kill()
        self.hosts.kill(0)
        return "host-0, with the driver and Ray's head"

    def kill_raylet(self) -> str:
        """Kills the raylet of one of the run's hosts."""
        host = self.rng.choice(self.run.hosts())
        node, address = host["node"], host["address"]
        self.headless = node == "host-0"

        def look() -> list[psutil.Process]:
            named = [process for process in self.family.alive() if processes.name(process) == "raylet"]
            return [process for process in named if f"node_ip_address={address} " in f"{processes.command(process)} "]

        victim = self.find(look, f"raylet of {node}")
        victim.kill()
        return f"the raylet of {node} (process {victim.pid})"


def _is_whole_sandbox(process: psutil.Process) -> bool:
    """It is the outer process of bubblewrap, and there is one inside."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.name() == "bwrap":
            return any(inner.status() != psutil.STATUS_ZOMBIE for inner in process.children())
    return False


KINDS = (
    Kind("trainer", "wide", _LOST_TRAINER, lambda scene: scene.kill_actor("trainer.0", "trainer.1")),
    Kind("engine", "narrow", _LOST_ENGINE, lambda scene: scene.kill_actor("rollout-0")),
    Kind(ENGINE_CORE, "narrow", _LOST_ENGINE, Scene.kill_core),
    Kind("relay", "narrow", r"[Rr]elay", lambda scene: scene.kill_actor("relay-0", "relay-1")),
    Kind("reward", "narrow", r"The reward actor reward-0 ", lambda scene: scene.kill_actor("reward-0")),
    Kind("sandbox", "narrow", r"[Ss]andbox", Scene.kill_sandbox),
    Kind("replica", "hybrid", r"hybrid-1|^Hybrid worker rollout-1 failed", lambda scene: scene.kill_actor("hybrid-1")),
    Kind("rollout host", "narrow", _LOST_ENGINE, lambda scene: scene.kill_host(training=False)),
    Kind("training host", "wide", _LOST_TRAINER, lambda scene: scene.kill_host(training=True)),
    Kind("driver", "narrow", _LOST_DRIVER, Scene.kill_driver),
    Kind("head host", "narrow", _LOST_DRIVER, Scene.kill_head),
    Kind("raylet", "wide", f"{_LOST_ENGINE}|{_LOST_TRAINER}|{_LOST_DRIVER}", Scene.kill_raylet),
)


def chosen(names: Sequence[str], engine: str, count: int, seed: int) -> list[Kind]:
    """So many kinds in a random order, each as often as the others, give or take one.

    Raises:
      ConfigError: there is no such kind, or none with this engine.
    """
    known = {kind.name: kind for kind in KINDS}
    for name in names:
        if name not in known:
            raise protocols.ConfigError(f"--kinds: {name!r} is not one of {', '.join(known)}")
    possible = [known[name] for name in names or known if engine == "vllm" or name != ENGINE_CORE]
    if not possible:
        raise protocols.ConfigError(f"--kinds: {ENGINE_CORE!r} is a process of vLLM; give --engine=vllm")
    rng = random.Random(seed)
    found: list[Kind] = []
    while len(found) < count:
        found += rng.sample(possible, len(possible))
    return found[:count]


def drill(plan: runs.Plan, kinds: Sequence[Kind]) -> Iterator[judging.Outcome]:
    """A run for each of the kinds, which is hit once."""
    for number, kind in enumerate(kinds):
        name = f"kill-{number + 1:02d}-{kind.name.replace(' ', '-')}"
        yield one(plan, name, kind, random.Random(f"{plan.seed} {number}"))


def one(plan: runs.Plan, name: str, kind: Kind, rng: random.Random) -> judging.Outcome:
    """One run, hit at a random moment of its first half."""

    def struck(family: processes.Family) -> blows.Blow:
        run = runs.Run(plan, name, kind.layout)
        with clusters.Cluster(settings.HOSTS[kind.layout] + 1) as cluster:  # a spare one
            cluster.start(run)
            blow = blows.at_random_moment(run, plan, rng, kind.expected)
            scene = Scene(run, cluster.hosts, family, rng, kind.layout)
            blow.land(kind.strike(scene))
            blow.may_end = scene.headless
            plan.say(f"{name}: {blow.hit} {blow.when}")
            blow.follow(lambda: cluster.start(run))
            blow.left = clusters.actors_left(family)
        return blow

    return blows.carried_out(name, struck)
