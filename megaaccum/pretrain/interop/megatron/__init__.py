"""Flags of Megatron-LM and Megatron-DeepSpeed, read into megaaccum's keys."""
