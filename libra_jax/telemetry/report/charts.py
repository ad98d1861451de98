"""The report's curves of metrics over the training steps, by the title of their section in `page.html.j2`."""

from __future__ import annotations

from libra_jax.telemetry.report.pictures import BLUE, GREEN, ORANGE, PURPLE, TEAL, Curves, Line

CHARTS = {
    "Reward": Curves(
        [
            Line("reward/mean", "reward of the step", width=2.4, smooth=True),
            Line("evaluation/accuracy", "held-out tasks", ORANGE, dashed=True, width=1.2, marker="D"),
        ],
        height=3.6,
        scale="share",
    ),
    "Generated tokens a second": Curves([Line("tokens_per_second", smooth=True)]),
    "Tokens a second and device": Curves(
        [
            Line("train/tokens_per_second_per_device", "trained", GREEN, smooth=True),
            Line("rollout/tokens_per_second_per_device", "generated", ORANGE, smooth=True),
        ]
    ),
    "Model FLOPs utilisation of training": Curves([Line("train/mfu", colour=PURPLE)], percent=True),
    "Staleness": Curves([Line("staleness/max", colour=TEAL, stairs=True)], integers=True),
    "Mismatch": Curves([Line("mismatch/kl", colour=ORANGE)], scale="log"),
    "Moves between instances": Curves([Line("routing/moves", colour=TEAL)], integers=True, moving=True),
    "Entropy": Curves([Line("entropy", "nats a token")]),
    "Gradient norm": Curves([Line("grad_norm", "before clipping")]),
    "KL": Curves(
        [
            Line("kl/reference", "to the reference", BLUE),
            Line("kl/behaviour", "to the sampling policy", ORANGE),
            Line("offpolicy/kl", "off-policy", GREEN),
        ],
        scale="log",
    ),
    "Clip fraction": Curves(
        [
            Line("clip/high_fraction", "high", BLUE),
            Line("clip/low_fraction", "low", ORANGE),
            Line("clip/dual_fraction", "dual", GREEN),
        ],
        percent=True,
    ),
    "Reward spread": Curves([Line("reward/std", "standard deviation")]),
    "Groups without a gradient": Curves([Line("groups/without_gradient", "share of groups")], percent=True),
    "Lengths": Curves([Line("tokens/mean", "tokens a rollout")]),
    "Loss": Curves([Line("loss", colour=GREEN)], scale="free"),
}
