"""Formats of other programs, read into megaaccum's keys (Megatron's flags and launch scripts, DeepSpeed's JSON), and
the two objects that Megatron's loops drive."""
