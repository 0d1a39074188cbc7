"""The fields that the argument classes of TRL add, one table for each trainer."""

from __future__ import annotations

from trainer_options.option import Options, tried, untried

_ALL: Options = {
    "router_aux_loss_coef": tried(0.0, 0.5),
    **untried("read when the model is given by its name", "model_init_kwargs", "trust_remote_code"),
}
_PREPARED: Options = {
    **_ALL,
    "max_length": tried(8, None),
    "pad_to_multiple_of": tried(8),
    "activation_offloading": tried(True),
    **untried("number of processes that prepare rows", "dataset_num_proc"),
}
_PAIRED: Options = {
    **_PREPARED,
    "disable_dropout": tried(False),
    "precompute_ref_log_probs": tried(True),
    "precompute_ref_batch_size": tried(4, precompute_ref_log_probs=True),
    "beta": tried(0.5),
    "sync_ref_model": tried(True),
    "ref_model_mixup_alpha": tried(0.1, sync_ref_model=True),
    "ref_model_sync_steps": tried(1, sync_ref_model=True),
}

SFT: Options = {
    **_PREPARED,
    "truncation_mode": tried("keep_start", "keep_end", max_length=8),
    "shuffle_dataset": tried(True),
    "packing": tried(True, max_length=16),
    "packing_strategy": tried("bfd", "bfd_split", "wrapped", packing=True, max_length=8),
    "padding_free": tried(True),
    "eval_packing": tried(True, False, packing=True, max_length=16, do_eval=True),
    "completion_only_loss": tried(False, True),
    "assistant_only_loss": tried(True, rows="conversations"),
    "loss_type": tried("nll", "dft", "chunked_nll"),
    "eos_token": tried("<|user|>"),
    "pad_token": tried("<|begin|>"),
    **untried("names rows or files", "dataset_text_field", "dataset_kwargs", "chat_template_path"),
}
DPO: Options = {
    **_PAIRED,
    "truncation_mode": tried("keep_start", "keep_end", max_length=8),
    "padding_free": tried(True),
    "pad_token": tried("<|begin|>"),
    "loss_type": tried(
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", ["sigmoid", "bco_pair", "sft"], label_smoothing=0.1,
    ),
    "loss_weights": tried([0.8, 0.2], loss_type=["sigmoid", "sft"]),
    "ld_alpha": tried(0.5, 0.0),
    "f_divergence_type": tried("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
    "f_alpha_divergence_coef": tried(0.9, f_divergence_type="alpha_divergence"),
    "label_smoothing": tried(0.3, loss_type="robust"),
    "use_weighting": tried(True),
    "discopop_tau": tried(0.5, loss_type="discopop"),
}  # fmt: skip
KTO: Options = {
    **_PAIRED,
    "loss_type": tried("kto", "apo_zero_unpaired"),
    "desirable_weight": tried(2.0),
    "undesirable_weight": tried(2.0),
}

_REUSED = {"num_iterations": 2, "learning_rate": 0.1}  # batches that the policy has moved away from
_ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 10.0}
GRPO: Options = {
    **_ALL,
    "disable_dropout": tried(True),
    "cast_lm_head_to_fp32": tried(True),
    "num_generations": tried(4, per_device_train_batch_size=4),
    "num_generations_eval": tried(1, do_eval=True),
    "max_completion_length": tried(6),
    "shuffle_dataset": tried(False),
    "pad_to_multiple_of": tried(8),
    "generation_batch_size": tried(4),
    "steps_per_generation": tried(2),
    "temperature": tried(0.5),
    "top_p": tried(0.5),
    "top_k": tried(5),
    "min_p": tried(0.1),
    "generation_kwargs": tried({"typical_p": 0.5}, {"do_sample": False}, {"num_beams": 2}),
    "repetition_penalty": tried(1.5),
    "cache_implementation": tried("static", "dynamic"),
    "beta": tried(0.1),
    "num_iterations": tried(2),
    "epsilon": tried(0.01, **_REUSED),
    "epsilon_high": tried(0.01, **_REUSED),
    "delta": tried(1.05, **_REUSED),
    "loss_type": tried("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo"),
    "importance_sampling_level": tried("token", "sequence", **_REUSED),
    "loss_type of sequences": tried("luspo", importance_sampling_level="sequence"),
    "sapo_temperature_neg": tried(3.0, loss_type="sapo", **_REUSED),
    "sapo_temperature_pos": tried(3.0, loss_type="sapo", **_REUSED),
    "vespo_k_pos": tried(1.0, loss_type="vespo", **_REUSED),
    "vespo_lambda_pos": tried(1.0, loss_type="vespo", **_REUSED),
    "vespo_k_neg": tried(1.0, loss_type="vespo", **_REUSED),
    "vespo_lambda_neg": tried(1.0, loss_type="vespo", **_REUSED),
    "reward_weights": tried([2.0]),
    "multi_objective_aggregation": tried("normalize_then_sum"),
    "scale_rewards": tried("group", "batch", "none", False),
    "mask_truncated_completions": tried(True),
    "sync_ref_model": tried(True, beta=0.1),
    "ref_model_mixup_alpha": tried(0.1, sync_ref_model=True, beta=0.1),
    "ref_model_sync_steps": tried(1, sync_ref_model=True, beta=0.1),
    "top_entropy_quantile": tried(0.5),
    "entropy_coef": tried(0.1),
    "use_adaptive_entropy": tried(True, entropy_coef=0.1),
    "entropy_coef_min": tried(0.1, **_ADAPTIVE),
    "entropy_coef_max": tried(0.05, **_ADAPTIVE),
    "entropy_coef_delta": tried(0.05, **_ADAPTIVE),
    "entropy_target": tried(1.0, use_adaptive_entropy=True, entropy_coef=0.1),
    "off_policy_mask_threshold": tried(0.001, **_REUSED),
    "use_bias_correction_kl": tried(False, beta=0.1),
    **untried("about conversations and tools", "chat_template_kwargs", "max_tool_calling_iterations"),
    **untried("about the log", "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"),
    **untried("network", "log_completions_hub_repo"),
    **untried("DeepSpeed, which is refused (T532)", "ds3_gather_for_generation"),
    **untried(
        "batches of requests need a GPU, and paged attention of stock code",
        "use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged",
    ),
    **untried(
        "vLLM is not installed, and does not run compiled models",
        "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex",
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
        "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap",
    ),
}  # fmt: skip
