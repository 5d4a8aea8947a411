"""Megatron's GPT as a configuration has it, and its forward step function; stages of transformers' models.

| module | holds |
| --- | --- |
| `gpt`, `layer_specs`, `layers`, `machine` | Megatron's GPT on every layout; kinds of layers, which of them run here |
| `gpt_forward` | its forward step function |
| `attention`, `local_norm` | parts of the local layers |
| `recompute_gradients` | gradients of recomputed layers |
| `hf_stages` | pipeline stages of a Hugging Face model |
"""
