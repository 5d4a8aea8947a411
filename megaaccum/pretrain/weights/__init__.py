"""Weights in and out of a run: models in Hugging Face's format, their configuration and their files.

| module | holds |
| --- | --- |
| `weights_in`, `weights_out` | Hugging Face folders into an engine; checkpoints into such a folder |
| `config_json`, `rows` | their configuration and their names, both ways |
| `safetensors_folder` | their files |
| `foreign`, `torch_dist`, `deepspeed_folder` | checkpoints of Megatron and DeepSpeed |
| `torch_dist_out` | written as Megatron's |
| `compare` | a folder against its digests and transformers' logits |
| `bridge` | an export by Megatron-Bridge's mapping |
| `inference` | a model of these weights that is not trained |
"""
