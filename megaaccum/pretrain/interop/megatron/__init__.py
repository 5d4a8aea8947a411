"""Flags of Megatron-LM and Megatron-DeepSpeed, read into megaaccum's keys.

| module | holds |
| --- | --- |
| `read_flags` | the door: flags to keys |
| `parser` | Megatron's own parser, and the verdicts (config/megatron_arguments.yaml) on what has no key |
| `several_flags` | keys that follow from more than one flag |
"""
