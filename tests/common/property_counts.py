"""Numbers of a property's examples: a few in every run, all of them with --hypothesis-profile=explore."""

import hypothesis


def examples(few, full):
    """Returns the number for this run's profile."""
    return few if hypothesis.settings.default.derandomize else full
