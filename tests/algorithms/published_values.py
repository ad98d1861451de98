"""Writes what verl and the authors of BAPO, T-PPO and VCPO compute on random batches to `published_values.json`.

The test beside it compares this project's losses and advantages with the file, so that no test needs verl. Run it
again only for another version, in an environment with verl 0.9.1 and one folder with the authors' files:
policy_loss.py (github.com/WooooDyy/BAPO, recipe/bapo at 3b8389c), tppo_algos.py (github.com/HanlinDu/verl, recipe/tppo
at 5a66921, with an author of T-PPO) and staleness_utils.py (github.com/mit-han-lab/vcpo, recipe/fully_async_policy at
c7f030f):

    python tests/algorithms/published_values.py FOLDER_OF_THE_AUTHORS_FILES
"""

import json
import pathlib
import sys
import types
from unittest import mock

import numpy as np

FILE = pathlib.Path(__file__).with_suffix(".json")
ROWS, TOKENS = 5, 8
BAPO = {
    "ratio_lower_start": 0.8,
    "ratio_upper_start": 1.2,
    "ratio_lower_max": 0.9,
    "ratio_upper_max": 3.0,
    "ratio_lower_step": 0.02,
    "ratio_upper_step": 0.05,
    "eps": 1e-12,
}

LOSSES = {
    # name: (verl's name, its settings, ours)
    "clipped": ("vanilla", {"clip_ratio_c": 1.5}, {"clip_high": 0.28, "dual_clip": 1.5}),
    "sequence": ("vanilla", {"clip_ratio_c": 1e6, "mode": "seq-mean-token-mean"}, {"aggregation": "sequence_mean"}),
    "gspo": ("gspo", {"mode": "seq-mean-token-mean"}, {"loss": "gspo", "aggregation": "sequence_mean"}),
    "cispo": ("cispo", {}, {"loss": "cispo", "clip_high": 0.28}),
    "sapo": (
        "sapo",
        {"tau_pos": 1.0, "tau_neg": 1.05, "mode": "seq-mean-token-mean"},
        {"loss": "sapo", "aggregation": "sequence_mean"},
    ),
    "gmpo": ("geo_mean", {}, {"loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequence_mean"}),
    # All candidates are dropped, because the choice among them is random.
    "clip_cov": (
        "clip_cov",
        {"policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0}},
        {"loss": "clip_cov", "loss_arguments": {"share": 1.0, "least": 0.2, "most": 5.0}},
    ),
    "kl_cov": (
        "kl_cov",
        {"policy_loss": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}},
        {"loss": "kl_cov", "loss_arguments": {"share": 0.3, "coefficient": 0.7}},
    ),
    "bapo": (
        "bapo",
        {"clip_ratio_c": 3.0, "policy_loss": {**BAPO, "adv_ratio_target": 1.5}},
        {"loss": "bapo", "dual_clip": 3.0, "loss_arguments": {"positive_share": 0.6}},
    ),
}

CORRECTIONS = {
    # name: (verl's arguments, ours)
    "truncated": (("token", 1.5), {"correction": "truncated", "correction_cap": 1.5}),
    "sequence": (
        ("sequence", 1.5),
        {"correction": "truncated", "correction_cap": 1.5, "correction_level": "sequence"},
    ),
    "icepop": (("token", "0.7_1.4"), {"correction": "masked", "correction_cap": 1.4, "correction_floor": 0.7}),
    # verl bounds the inverse ratio; it returns a mask, so only zeros are compared.
    "geometric": (
        ("seq_mean_k1", f"{1 / 1.2}_{1 / 0.8}"),
        {"correction": "masked", "correction_cap": 1.2, "correction_floor": 0.8, "correction_level": "geometric"},
    ),
}

WINDOW_LENGTHS = (TOKENS, 5, TOKENS, 3, 1)
"""Lengths of the rollouts of T-PPO's case. A rollout that fills the window is truncated."""

BASELINES = {
    # name: (the authors' settings of VCPO's baseline, ours)
    "weighted": ({}, {}),
    "clipped": ({"use_clipped_is_ratios": True}, {"cap": 1.5}),
    "unweighted": ({"use_is_weights": False}, {"weighted": False}),
    "by_length": ({"normalize_by_length": True}, {"by_length": True}),
}


def batch(seed):
    """One trajectory a row, some of their tokens untrained; the last row has a trajectory of one token."""
    rng = np.random.default_rng(seed)
    lengths = np.array([TOKENS, 5, 7, 3, 1])
    mask = (np.arange(TOKENS) < lengths[:, None]) & (rng.random((ROWS, TOKENS)) < 0.8)
    mask[:, 0] = True
    log_probs = -rng.exponential(1.0, (ROWS, TOKENS))
    return {
        "lengths": lengths.tolist(),
        "mask": mask.astype(int).tolist(),
        "log_probs": log_probs.tolist(),
        "behaviour": (log_probs + rng.normal(0, 0.5, (ROWS, TOKENS))).tolist(),
        "advantages": np.repeat(rng.normal(0, 1, (ROWS, 1)), TOKENS, axis=1).tolist(),
        "rewards": rng.normal(0, 1, ROWS).tolist(),
        "groups": [4, 4, 4, 9, 9],
        "values": rng.normal(0, 1, (ROWS, TOKENS)).tolist(),
        "norms": rng.exponential(1.0, ROWS).tolist(),
    }


def main(folder):
    import torch
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

    sys.path.insert(0, folder)
    __import__("policy_loss")
    # The authors' file of VCPO imports what its baseline does not use.
    sys.modules |= {name: mock.MagicMock() for name in ("megatron", "megatron.core")}
    sys.modules["verl.utils.torch_functional"].allgather_dict_into_list = None
    staleness_utils, tppo_algos = __import__("staleness_utils"), __import__("tppo_algos")

    def loss(fields, name, settings, ours):
        tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in fields.items()}
        current = tensors["log_probs"].clone().requires_grad_()
        config = mock.MagicMock(spec=ActorConfig)
        config.get = lambda key, default=None: settings.get(key, default)
        config.clip_ratio, config.clip_ratio_low = 0.2, ours.get("clip_low", 0.2)
        config.clip_ratio_high, config.clip_ratio_c = ours.get("clip_high", 0.2), settings.get("clip_ratio_c", 1e6)
        config.tau_pos, config.tau_neg = settings.get("tau_pos"), settings.get("tau_neg")
        config.global_batch_info = {}
        config.policy_loss = mock.MagicMock(**settings.get("policy_loss", {}))
        found = core_algos.get_policy_loss_fn(name)(
            tensors["behaviour"],
            current,
            tensors["advantages"],
            tensors["mask"],
            loss_agg_mode=settings.get("mode", "token-mean"),
            config=config,
        )[0]
        found.backward()
        return {"loss": float(found), "gradient": current.grad.tolist()}

    def advantages(fields):
        mask = torch.tensor(fields["mask"], dtype=torch.float64)
        token_rewards = torch.zeros_like(mask)
        for row, reward in enumerate(fields["rewards"]):
            token_rewards[row, int(np.flatnonzero(fields["mask"][row])[-1])] = reward
        index = np.array(fields["groups"])
        config = mock.MagicMock(gamma=1.0)
        values = torch.tensor(fields["values"], dtype=torch.float64)
        spread, returns = core_algos.compute_gae_advantage_return(token_rewards, values, mask, 0.97, 0.9)
        found = {
            "grpo": core_algos.compute_grpo_outcome_advantage(token_rewards, mask, index)[0],
            "dr_grpo": core_algos.compute_grpo_outcome_advantage(
                token_rewards, mask, index, norm_adv_by_std_in_grpo=False
            )[0],
            "rloo": core_algos.compute_rloo_outcome_advantage(token_rewards, mask, index)[0],
            "opo": core_algos.compute_opo_outcome_advantage(token_rewards.clone(), mask, index)[0],
            "reinforce_plus_plus": core_algos.compute_reinforce_plus_plus_outcome_advantage(
                token_rewards, mask, config=config
            )[0],
            "gae_whitened": spread,
            "gae_returns": returns,
        }
        old = torch.tensor(fields["behaviour"], dtype=torch.float64)
        value_loss = core_algos.compute_value_loss(values, returns, old, mask, 0.3, loss_agg_mode="token-mean")
        found["value_loss"], found["clip_fraction"] = (torch.full_like(mask, float(item)) for item in value_loss)
        return {name: (value * mask).tolist() for name, value in found.items()}

    def corrections(fields):
        mask = torch.tensor(fields["mask"], dtype=torch.float64)
        log_ratio = torch.tensor(fields["log_probs"]) - torch.tensor(fields["behaviour"])
        found = {}
        for name, (arguments, _) in CORRECTIONS.items():
            if arguments[0].startswith("seq_mean"):
                found[name] = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, *arguments)[0]
            else:
                found[name] = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, *arguments)[0]
        return {name: value.tolist() for name, value in found.items()}

    def truncated(fields):
        """T-PPO's advantages and returns; without a discount, because the authors' code needs that here."""
        lengths = torch.tensor(WINDOW_LENGTHS)
        finished, mask = (lengths < TOKENS).long(), (torch.arange(TOKENS) < lengths[:, None]).double()
        rewards = torch.zeros_like(mask)
        rewards[torch.arange(ROWS), lengths - 1] = finished * torch.tensor(fields["rewards"], dtype=torch.float64)
        _, advantages, returns = tppo_algos.compute_truncate_gae_advantage_return(
            rewards,
            rewards,
            torch.tensor(fields["values"], dtype=torch.float64),
            eos_mask=mask,
            gamma=1.0,
            lam=0.9,
            use_variable_lambda=True,
            variable_lambda_scalar=2.0,
            adv_whiten=True,
            use_separate_critic_lam=True,
            critic_lam=1.0,
            is_finished=finished,
            ignore_token_num=2,
            rounds_eos_mask=mask * finished[:, None],
            seq_len_per_sample=lengths.double(),
            is_clamp=True,
        )
        return {"advantages": advantages.tolist(), "returns": (returns * mask).tolist()}

    def baselines(fields, **settings):
        """VCPO's baseline of each trajectory's group, from norms of gradients that are given."""
        log_ratio = (np.array(fields["log_probs"]) - np.array(fields["behaviour"])) * np.array(fields["mask"])
        ratios, lengths = np.exp(log_ratio.sum(axis=1)), np.array(fields["mask"]).sum(axis=1)
        records = [
            types.SimpleNamespace(
                group_uid=group,
                reward_scalar=reward,
                rollout_seq_is=ratio,
                rollout_seq_is_clipped=min(ratio, 1.5),
                grad_norm_unscaled=norm,
                response_length=int(length),
            )
            for group, reward, ratio, norm, length in zip(
                fields["groups"], fields["rewards"], ratios, fields["norms"], lengths, strict=True
            )
        ]
        return [staleness_utils.compute_opob_baseline(records, group, **settings) for group in fields["groups"]]

    cases = []
    for seed in range(2):
        fields = batch(seed)
        found = {name: loss(fields, *case) for name, case in LOSSES.items()}
        cases.append({"batch": fields, "losses": found, "advantages": advantages(fields)})
        cases[-1]["corrections"], cases[-1]["truncated"] = corrections(fields), truncated(fields)
        cases[-1]["baselines"] = {name: baselines(fields, **theirs) for name, (theirs, _) in BASELINES.items()}

    def rounded(value):
        if isinstance(value, float):
            return float(f"{value:.9g}")
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items()}
        return [rounded(item) for item in value] if isinstance(value, list) else value

    FILE.write_text(json.dumps(rounded(cases)) + "\n")
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
