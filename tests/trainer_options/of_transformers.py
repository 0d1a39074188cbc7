"""The fields of `transformers.TrainingArguments`, which TRL's argument classes have too."""

from __future__ import annotations

from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from trainer_options.option import Options, tried, untried

_LONG = {"max_steps": 4, "per_device_train_batch_size": 3}  # of 8 rows: a short batch, and a second epoch
_BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.1}

NUMBERS: Options = {
    "per_device_train_batch_size": tried(1, 4),
    "num_train_epochs": tried(0.5, max_steps=-1),
    "max_steps": tried(2),
    "learning_rate": tried(1e-3),
    "weight_decay": tried(0.5),
    "adam_beta1": tried(0.5),
    "adam_beta2": tried(0.9),
    "adam_epsilon": tried(1e-2),
    "gradient_accumulation_steps": tried(2, 3),
    "average_tokens_across_devices": tried(False, gradient_accumulation_steps=2),
    "max_grad_norm": tried(0.01, 0.0),
    "label_smoothing_factor": tried(0.1, 0.5),
    "neftune_noise_alpha": tried(5.0),
    "warmup_steps": tried(2, 0.5),
    "seed": tried(7),
    "data_seed": tried(3),
    "train_sampling_strategy": tried("group_by_length", "sequential"),
    "use_cache": tried(True),
    "dataloader_drop_last": tried(True, **_LONG),
    "accelerator_config": tried({"split_batches": True}, {"use_seedable_sampler": False}),
    "remove_unused_columns": tried(False),
    "include_num_input_tokens_seen": tried("all", "non_padding"),
}
PRECISION: Options = {
    "bf16": tried(True),
    "fp16": tried(True),
    "bf16_full_eval": tried(True, do_eval=True),
    "fp16_full_eval": tried(True, do_eval=True),
    "activation_checkpointing": tried(True),
    "activation_checkpointing_kwargs": tried(
        {"use_reentrant": False}, {"use_reentrant": True}, activation_checkpointing=True
    ),
    "gradient_checkpointing": tried(True),
    "gradient_checkpointing_kwargs": tried({"use_reentrant": False}, gradient_checkpointing=True),
    "use_liger_kernel": tried(True, refused="T537"),
    "use_liger_kernel of loss and norms": tried(True, liger_kernel_config={"swiglu": False}),
}
_IN_TORCH = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
_SCHEDULE_OF = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 2},
}  # what a schedule cannot do without
SCHEDULES: Options = {
    "optim": tried(*_IN_TORCH),
    "lr_scheduler_type": tried(
        *(each.value for each in SchedulerType if each.value not in _SCHEDULE_OF), eval_strategy="steps", eval_steps=1
    ),
    "lr_scheduler_kwargs": tried({"num_cycles": 2}, lr_scheduler_type="cosine_with_restarts"),
    "lr_scheduler_kwargs of polynomial": tried({"power": 2.0}, lr_scheduler_type="polynomial"),
    **{
        f"lr_scheduler_type of {name}": tried(name, lr_scheduler_kwargs=settings)
        for name, settings in _SCHEDULE_OF.items()
    },
}
PACKAGES: Options = {
    "optim of packages": tried(*(each.value for each in OptimizerNames if each.value not in _IN_TORCH)),
}  # that this project does not require: a single trainer tries them
EVALUATION: Options = {
    "eval_strategy": tried("steps", eval_steps=1),
    "eval_steps": tried(2, eval_strategy="steps"),
    "eval_delay": tried(2, eval_strategy="steps", eval_steps=1),
    "eval_on_start": tried(True, eval_strategy="steps", eval_steps=2),
    "per_device_eval_batch_size": tried(3, do_eval=True),
    "prediction_loss_only": tried(True, do_eval=True),
    "eval_do_concat_batches": tried(False, do_eval=True),
    "eval_accumulation_steps": tried(1, do_eval=True),
    "label_names": tried(["labels"], do_eval=True),
    "load_best_model_at_end": tried(True, **_BEST),
    "metric_for_best_model": tried("eval_loss", load_best_model_at_end=True, **_BEST),
    "greater_is_better": tried(True, metric_for_best_model="eval_loss", load_best_model_at_end=True, **_BEST),
}
NO_NUMBERS: Options = {
    **untried("says what a script does", "do_train", "do_eval", "do_predict"),
    **untried(
        "about the log",
        "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter",
        "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
        "trackio_bucket_id", "trackio_static_space_id", "debug", "skip_memory_metrics",
    ),
    **untried(
        "about files", "output_dir", "save_only_model", "save_strategy", "save_steps", "save_on_each_node",
        "save_total_limit", "enable_jit_checkpoint",
    ),
    **untried(
        "read when a run is resumed: tests/training/trainers/test_resuming.py",
        "resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint",
    ),
    **untried("memory only", "torch_empty_cache_steps", "auto_find_batch_size"),
    **untried("metrics of the user's functions", "include_for_metrics", "batch_eval_metrics"),
    **untried(
        "how batches are fetched",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        "length_column_name",
    ),
    **untried("read by optimizers that are not installed", "optim_args", "optim_target_modules"),
    **untried("flags of the whole process, for GPUs", "full_determinism", "tf32", "use_cpu"),
    **untried("read with `use_liger_kernel`", "liger_kernel_config"),
    **untried("a C++ compiler for minutes", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
}  # fmt: skip
MACHINES: Options = {
    **untried(
        "network",
        "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision",
    ),
    **untried(
        "several processes: tests/training/trainers/test_distributed.py",
        "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
        "ddp_backend", "ddp_timeout", "local_rank", "eval_use_gather_object", "parallelism_config",
    ),
    **untried("refused (T532): tests/training/trainers/test_trainer.py", "fsdp", "fsdp_config", "deepspeed"),
}  # fmt: skip
OPTIONS: Options = {**NUMBERS, **PRECISION, **SCHEDULES, **EVALUATION, **NO_NUMBERS, **MACHINES}
