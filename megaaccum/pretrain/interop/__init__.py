"""Readers of other programs' formats: Megatron's flags and launch scripts, DeepSpeed's JSON."""
