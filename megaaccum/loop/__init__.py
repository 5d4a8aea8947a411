"""Megatron's contract: its train_step and its pretrain over the sharding backends of this package."""
