"""The models that a step is given: the names and sizes of their parameters, their state beside those, and what does not
fit.

| module | holds |
| --- | --- |
| `names`, `sizes` | names and sizes over the whole model |
| `attention` | documents and cut sequences in attention |
| `fp8`, `router_state` | FP8 scales, routers' state |
| `torch_chunk` | a model that is not Megatron's |
| `unfit` | what no accumulated step trains, or a backend does not take |
"""
