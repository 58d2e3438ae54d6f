"""Names of other packages (TRL, transformers, peft, verl, Lightning, kvpress), and what to write here.

A name stands for every key that ends in it: `lr` also for `actor_rollout_ref.actor.optim.lr`.
"""

SAME = {
    # responses and sampling
    "num_generations": "algorithm.group_size",
    "rollout.n": "algorithm.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "min_p": "rollout.min_p",
    "val_kwargs.temperature": "evaluation.temperature",
    "val_kwargs.top_k": "evaluation.top_k",
    "val_kwargs.top_p": "evaluation.top_p",
    "train_batch_size": "rollout.n_prompts",
    "max_num_seqs": "rollout.max_rows",
    "ppo_max_token_len_per_gpu": "fabric.tokens_per_pass",
    "log_prob_max_token_len_per_gpu": "fabric.tokens_per_pass",
    "max_token_len_per_gpu": "fabric.tokens_per_pass",
    # the algorithm
    "num_iterations": "algorithm.n_epochs",
    "ppo_epochs": "algorithm.n_epochs",
    "num_ppo_epochs": "algorithm.n_epochs",
    "total_training_steps": "algorithm.n_iterations",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "beta": "algorithm.kl.weight",
    "kl_coef": "algorithm.kl.weight",
    "kl": "algorithm.kl.weight",
    "kl_loss_type": "algorithm.kl.estimator",
    "target_kl": "algorithm.loss.target_kl",
    "kl_ctrl.target_kl": "algorithm.kl.target",
    "kl_ctrl.horizon": "algorithm.kl.horizon",
    "ref_model_mixup_alpha": "algorithm.reference_sync.alpha",
    "epsilon_high": "algorithm.loss.clip_high",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "epsilon_low": "algorithm.loss.clip_low",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "delta": "algorithm.loss.delta",
    "clip_ratio_c": "algorithm.loss.delta",
    "importance_sampling_level": "algorithm.loss.importance_sampling_level",
    "entropy_coef": "algorithm.entropy_coef",
    "entropy_coeff": "algorithm.entropy_coef",
    "top_entropy_quantile": "algorithm.advantage.top_entropy_quantile",
    "use_bias_correction_kl": "algorithm.kl.bias_correction",
    "cliprange_value": "algorithm.loss.value_clip",
    "vf_coef": "algorithm.loss.value_weight",
    "gae_lambda": "algorithm.advantage.lam",
    "lam": "algorithm.advantage.lam",
    "lambda": "algorithm.advantage.lam",
    "gamma": "algorithm.advantage.gamma",
    "filter_groups.enable": "algorithm.advantage.filter_zero_std_groups",
    "max_grad_norm": "algorithm.max_grad_norm",
    "gradient_clip_val": "algorithm.max_grad_norm",
    "grad_clip": "algorithm.max_grad_norm",
    "vllm_importance_sampling_cap": "correction.weight_fn.cap",
    "rollout_correction.bypass_mode": "correction.bypass_mode",
    "num_splits": "rollout.n_splits",
    "router_replay.mode": "rollout.replay_routing",
    "router_replay.enabled": "rollout.replay_routing",
    "enable_return_routed_experts": "rollout.replay_routing",
    # the optimizer
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "lr_scheduler_type": "algorithm.lr_schedule",
    "lr_scheduler": "algorithm.lr_schedule",
    "warmup_steps": "algorithm.n_warmup_steps",
    "lr_warmup_steps": "algorithm.n_warmup_steps",
    # the model and its adapters
    "model_name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "model_name": "model.path",
    "model_id": "model.path",
    "model_path": "model.path",
    "base_model": "model.path",
    "lora_r": "roles.rank",
    "lora_rank": "roles.rank",
    "r": "roles.rank",
    "lora_alpha": "roles.alpha",
    "lora_target_modules": "roles.target_modules",
    "enable_gradient_checkpointing": "roles.gradient_checkpointing",
    # the KV cache
    "cache": "cache.policy",
    "press": "cache.policy",
    "cache_budget": "cache.budget",
    "window_size": "cache.window",
    # data
    "prompt_key": "task.prompt_column",
    "dataset_split": "task.split",
    "dataset_train_split": "task.split",
    "dataset_test_split": "task.eval_split",
    "system_prompt": "task.system_prompt",
    # devices, checkpoints, logging
    "n_gpus_per_node": "fabric.devices",
    "num_gpus": "fabric.devices",
    "gpus": "fabric.devices",
    "num_processes": "fabric.devices",
    "nnodes": "fabric.num_nodes",
    "data_seed": "seed",
    "save_freq": "callbacks.checkpoint_every",
    "save_total_limit": "callbacks.keep_last",
    "max_actor_ckpt_to_keep": "callbacks.keep_last",
    "save_top_k": "callbacks.keep_best",
    "metric_for_best_model": "callbacks.best_metric",
    "num_completions_to_print": "callbacks.n_samples",
    "eval_batch_size": "evaluation.batch_size",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "resume_from_checkpoint": "resume",
    "resume_from_path": "resume",
    "ckpt_path": "resume",
    "project_name": "logger.project",
    "wandb_project": "logger.project",
    "entity": "logger.entity",
    # python -m lit_rlkv.evaluate and export
    "ckpt_dir": "ckpt",
    "checkpoint": "ckpt",
    "run_dir": "ckpt",
    "run": "ckpt",
    "model": "ckpt",
    "budget": "budgets",
    "policy": "policies",
    "num_samples": "n_samples",
    "output": "to",
    "out": "to",
    "output_dir": "to",
}
"""The key that means the same. Where a program or option lacks the key, the name has no meaning there."""

ONE_BATCH = (
    "there is no batch size of one step: an iteration samples 'rollout.n_prompts' prompts with "
    "'algorithm.group_size' responses each, and 'algorithm.n_minibatches' cuts them into optimizer steps"
)
PASSES_OF_A_STEP = (
    "'fabric.tokens_per_pass' is the most tokens in a pass; an optimizer step is cut into as many passes as "
    "it needs, with the same gradient"
)
EPOCHS = (
    "passes over the data are not counted here: 'algorithm.n_iterations' times 'rollout.n_prompts' prompts "
    "are drawn; 'algorithm.n_epochs' is the number of passes over each rollout"
)
EVALUATED = (
    "evaluation is a stage before and after training, 'stages=[sft,rl,eval]', on 'evaluation.n_prompts' "
    "prompts; the reward of every iteration is logged"
)
ESTIMATOR = (
    "'algorithm.advantage.estimator' chooses how rewards are scaled: grpo divides by the std of the group, "
    "dr_grpo by none, and batch_std by that of all rewards of the batch"
)
CLIPPED = "write 'algorithm.loss.clip_low' and 'algorithm.loss.clip_high', the bounds below and above 1"
LOGGERS = "choose by 'logger=wandb', 'logger=tensorboard' or 'logger=csv'"
FOLDERS = "'runs_dir' is the folder of all runs; 'hydra.run.dir' is the folder of this one"
RUN_NAME = "a run is named by its folder, 'hydra.run.dir=runs/NAME'; 'logger=wandb' also takes 'logger.name'"
DATA = "write 'task=dataset' and 'task.dataset', which takes a file, a folder or a name on the hub"
ROLLOUTS = "rollouts are sampled in the same process by an evicting cache, see 'cache.policy'; leave it out"
LOGGED = "every iteration is logged; 'callbacks.samples_every' is the interval of printed responses"
ADAPTERS = (
    "'roles.layout' decides what trains an adapter, 'roles.rank' and 'roles.alpha' its size; 'roles=full' "
    "trains all weights"
)
SHARDED = "'fabric.strategy=fsdp2' shards a large backbone over the processes"
REWARD_MODEL = (
    "'reward=learned' takes the score of the reward head that the SFT stage trains; 'reward=endpoint' asks a "
    "service"
)
REWARD_FUNCTIONS = "'reward.functions' holds reward functions, each with its weight; such as 'reward=python'"
PRECISIONS = "'fabric.precision' is one of 32-true, 64-true, bf16-true, 16-mixed and bf16-mixed"
UPPER_BOUND = (
    "it is 'correction.weight_fn.cap' of 'correction=tis' and 'correction=sequence_tis', and "
    "'correction.weight_fn.high' of the corrections that mask"
)
OFF_POLICY = "'correction' chooses replay or importance weights, such as 'correction=tis'"

DIFFERENT = {
    "batch_size": ONE_BATCH,
    "per_device_train_batch_size": ONE_BATCH,
    "generation_batch_size": ONE_BATCH,
    "rollout_batch_size": ONE_BATCH,
    "ppo_mini_batch_size": "it counts rows; 'algorithm.n_minibatches' counts the optimizer steps of a pass",
    "num_mini_batches": "'algorithm.n_minibatches' counts the optimizer steps of a pass over the rollout",
    "steps_per_generation": "'algorithm.n_minibatches' counts the optimizer steps of a pass over the rollout",
    "n_micro_batches": PASSES_OF_A_STEP,
    "rows_per_pass": PASSES_OF_A_STEP,
    "ppo_micro_batch_size": PASSES_OF_A_STEP,
    "ppo_micro_batch_size_per_gpu": PASSES_OF_A_STEP,
    "log_prob_micro_batch_size_per_gpu": PASSES_OF_A_STEP,
    "gradient_accumulation_steps": PASSES_OF_A_STEP,
    "accumulate_grad_batches": PASSES_OF_A_STEP,
    "max_steps": (
        "it counts optimizer steps; 'algorithm.n_iterations' counts iterations, each of "
        "'algorithm.n_epochs' × 'algorithm.n_minibatches' steps"
    ),
    "num_train_epochs": EPOCHS,
    "total_epochs": EPOCHS,
    "max_epochs": EPOCHS,
    "num_epochs": EPOCHS,
    "epochs": EPOCHS,
    "scale_rewards": ESTIMATOR,
    "norm_adv_by_std_in_grpo": ESTIMATOR,
    "adv_estimator": "choose by 'algorithm', such as 'algorithm=grpo', or 'algorithm=ppo' for GAE",
    "loss_type": (
        "'algorithm' chooses the method, such as 'algorithm=dapo', 'algorithm=dr_grpo' or 'algorithm=cispo', "
        "and 'algorithm.aggregation' how token losses become one"
    ),
    "loss_mode": "choose by 'algorithm', such as 'algorithm=gspo' or 'algorithm=cispo'",
    "loss_agg_mode": (
        "'algorithm.aggregation' is token (token-mean), sequence (seq-mean-token-mean) or constant "
        "(seq-mean-token-sum-norm)"
    ),
    "epsilon": CLIPPED,
    "clip_ratio": CLIPPED,
    "cliprange": CLIPPED,
    "clip_range": CLIPPED,
    "use_kl_loss": "'algorithm.kl.weight' above 0 turns it on, with 'algorithm.kl.place=loss'",
    "kl_loss_coef": "write 'algorithm.kl.weight', with 'algorithm.kl.place=loss'",
    "use_kl_in_reward": "'algorithm.kl.weight' above 0 turns it on, with 'algorithm.kl.place=reward'",
    "kl_ctrl.kl_coef": "write 'algorithm.kl.weight', with 'algorithm.kl.place=reward'",
    "kl_penalty": "'algorithm.kl.estimator' is k1, k2 or k3, and 'algorithm.kl.place' is loss or reward",
    "whiten_rewards": "write 'reward.normalize=batch'",
    "vllm_importance_sampling_correction": OFF_POLICY,
    "vllm_importance_sampling_mode": (
        "token_truncate is 'correction=tis', token_mask 'correction=mis', sequence_truncate "
        "'correction=sequence_tis' and sequence_mask 'correction=sequence_mis'"
    ),
    "vllm_importance_sampling_clip_max": UPPER_BOUND,
    "vllm_importance_sampling_clip_min": (
        "it is 'correction.weight_fn.low' of 'correction=mis' and 'correction=sequence_mis', which mask"
    ),
    "rollout_is": "token is 'correction=tis', sequence is 'correction=sequence_tis'",
    "rollout_is_threshold": UPPER_BOUND,
    "cast_lm_head_to_fp32": "logits are always float32; leave it out",
    "critic.optim.lr": "in 'algorithm=ppo', it is 'algorithm.loss.value_lr_scale' times 'optimizer.lr'",
    "warmup_ratio": "'algorithm.n_warmup_steps' counts optimizer steps",
    "lr_warmup_steps_ratio": "'algorithm.n_warmup_steps' counts optimizer steps",
    "adam_beta1": "'optimizer.betas=[0.9,0.98]' has both",
    "adam_beta2": "'optimizer.betas=[0.9,0.98]' has both",
    "optim": "'optimizer._target_' is any of torch.optim, such as 'optimizer._target_=torch.optim.AdamW'",
    "adam_epsilon": "add it as an argument of the optimizer, '+optimizer.eps=1e-8'",
    "use_vllm": ROLLOUTS,
    "vllm_mode": ROLLOUTS,
    "vllm_gpu_memory_utilization": ROLLOUTS,
    "gpu_memory_utilization": ROLLOUTS,
    "rollout.name": ROLLOUTS,
    "repetition_penalty": (
        "a penalty changes logits by the tokens sampled before, and of the sampler's distribution only the "
        "set of tokens is replayed; leave it out"
    ),
    "compression_ratio": "'cache.budget' is a number of keys",
    "reward_funcs": REWARD_FUNCTIONS,
    "reward_functions": REWARD_FUNCTIONS,
    "reward_weights": REWARD_FUNCTIONS,
    "custom_reward_function.path": "write 'reward=python' and 'reward.functions.custom.path=FILE:FUNCTION'",
    "custom_reward_function.name": "write 'reward=python' and 'reward.functions.custom.path=FILE:FUNCTION'",
    "reward_model": REWARD_MODEL,
    "reward_model_path": REWARD_MODEL,
    "reward_model.model.path": REWARD_MODEL,
    "critic.model.path": "'roles.layout' decides what the critic shares; it starts from 'model.path'",
    "ref_model": "the reference is the model at the start of RL, in the layout of 'roles.layout'",
    "use_peft": ADAPTERS,
    "use_lora": ADAPTERS,
    "peft_config": ADAPTERS,
    "lora_dropout": "adapters have no dropout, so that replay is exact; " + ADAPTERS,
    "tokenizer": "'model.path' brings its own tokenizer",
    "tokenizer_name": "'model.path' brings its own tokenizer",
    "tokenizer_name_or_path": "'model.path' brings its own tokenizer",
    "trust_remote_code": "a checkpoint's code is never run; 'trusted_modules' is for modules of your own",
    "data.path": DATA,
    "dataset": DATA,
    "dataset_name": DATA,
    "dataset_path": DATA,
    "data_path": DATA,
    "data": DATA,
    "train_files": DATA,
    "train_file": DATA,
    "train_dataset": DATA,
    "val_files": "'task.eval_split' of 'task=dataset' names the problems to evaluate on",
    "eval_dataset": "'task.eval_split' of 'task=dataset' names the problems to evaluate on",
    "bf16": "write 'fabric.precision=bf16-mixed', or bf16-true for a frozen backbone under adapters",
    "fp16": "write 'fabric.precision=16-mixed'",
    "dtype": PRECISIONS,
    "torch_dtype": PRECISIONS,
    "mixed_precision": PRECISIONS,
    "load_in_4bit": "write 'fabric.quantization=4bit'",
    "use_cpu": "write 'fabric.accelerator=cpu'",
    "no_cuda": "write 'fabric.accelerator=cpu'",
    "device": "write 'fabric.accelerator=cpu' or cuda, and 'fabric.devices' for the number of processes",
    "fsdp": SHARDED,
    "fsdp_config": SHARDED,
    "deepspeed": SHARDED,
    "save_steps": "'callbacks.checkpoint_every' counts iterations",
    "save_strategy": "'callbacks.checkpoint_every' counts iterations between checkpoints",
    "every_n_train_steps": "'callbacks.checkpoint_every' counts iterations",
    "load_best_model_at_end": "'callbacks.keep_best' keeps the best checkpoints, by 'callbacks.best_metric'",
    "greater_is_better": "'callbacks.best_mode' is max or min",
    "eval_steps": EVALUATED,
    "eval_strategy": EVALUATED,
    "eval_on_start": EVALUATED,
    "do_eval": EVALUATED,
    "test_freq": EVALUATED,
    "val_before_train": EVALUATED,
    "val_check_interval": EVALUATED,
    "check_val_every_n_epoch": EVALUATED,
    "limit_val_batches": "'evaluation.n_prompts' is the number of held-out prompts",
    "logging_steps": LOGGED,
    "log_every_n_steps": LOGGED,
    "log_completions": LOGGED,
    "report_to": LOGGERS,
    "wandb": LOGGERS,
    "use_wandb": LOGGERS,
    "tensorboard": LOGGERS,
    "trainer.logger": LOGGERS,
    "output_dir": FOLDERS,
    "logging_dir": FOLDERS,
    "default_root_dir": FOLDERS,
    "default_local_dir": FOLDERS,
    "save_dir": FOLDERS,
    "resume_mode": "'resume=auto' takes the newest run of this config, 'resume=runs/NAME' that run",
    "run_name": RUN_NAME,
    "experiment_name": RUN_NAME,
    "fast_dev_run": "write 'debug=fast'",
    "enable_checkpointing": "every run saves checkpoints, at an interval of 'callbacks.checkpoint_every'",
    "attn_implementation": "attention is the one that replays evictions, run by 'kernels'; leave it out",
    "max_prompt_length": "prompts are never cut; 'rollout.max_new_tokens' bounds the response",
    "max_length": "prompts are never cut; 'rollout.max_new_tokens' bounds the response",
    "disable_dropout": "dropout is always 0; leave it out",
    "push_to_hub": "python -m lit_rlkv.export writes a folder that huggingface_hub uploads; leave it out",
    "sync_ref_model": "a number in 'algorithm.reference_sync.every' turns it on, with 'roles=full'",
    "ref_model_sync_steps": "it counts optimizer steps; 'algorithm.reference_sync.every' counts iterations",
    "tensor_model_parallel_size": SHARDED,
}
"""Advice for names that no key means the same as. Single quotes hold a key, or key=value."""
