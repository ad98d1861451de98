"""Games with gymnasium's interface and faults, for tests."""

import time


class Space:
    def __init__(self, n):
        self.n = n


class Countdown:
    """Ends at zero; text observations, choices to go down by 1, 2 or 3, and other faults by name."""

    def __init__(self, fault="", from_=6):
        self.action_space = Space(3)
        self.fault, self.left, self.start = fault, from_, from_

    def reset(self, seed=None):
        self.left = self.start + seed % 2
        return f"{self.left} left", {}

    def step(self, action):
        if self.fault == "raise":
            raise ValueError("the board is broken")
        if self.fault == "hang":
            time.sleep(60)
        self.left -= int(action) + 1
        return f"{self.left} left", 0.5, self.left <= 0, False, {}


class Words:
    """Takes any text; no gymnasium spaces."""

    def reset(self, seed=None):
        return "say please", {}

    def step(self, action):
        return action.upper(), float("please" in action), True, False, {}


def make(name, **arguments):
    return {"Countdown": Countdown, "Words": Words}[name](**arguments)


def spell(observation):
    return f"state {int(observation)}"
