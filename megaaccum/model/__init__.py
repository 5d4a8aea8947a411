"""The model of a run: Megatron's GPT, the names of its parameters, their number, and its floating-point operations.

| module | holds |
| --- | --- |
| `gpt`, `layer_specs`, `layers`, `machine` | Megatron's GPT on every layout; kinds of layers, which of them run here |
| `gpt_forward`, `packed_rows`, `cross_entropy` | its forward step function |
| `names`, `sizes` | names and sizes over the whole model |
| `attention`, `local_norm` | parts of the local layers |
| `fp8`, `router_state`, `recompute_gradients` | FP8 scales, routers' state, gradients of recomputed layers |
| `torch_chunk`, `hf_stages` | models that are not Megatron's |
| `unfit` | what no accumulated step trains, or a backend does not take |
"""
