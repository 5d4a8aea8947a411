"""Weights in and out of a run: models in Hugging Face's format, their configuration and their files.

| module | holds |
| --- | --- |
| `foreign` | weights of other programs into an engine |
| `weights_in`, `torch_dist`, `deepspeed_folder` | these: Hugging Face folders, checkpoints of Megatron and DeepSpeed |
| `weights_out`, `torch_dist_out` | checkpoints of ours written as Hugging Face's and as Megatron's |
| `config_json`, `rows` | Hugging Face's configuration and names, both ways |
| `safetensors_folder` | Hugging Face's files |
| `compare` | a folder against its digests and transformers' logits |
| `bridge` | an export by Megatron-Bridge's mapping |
| `inference` | a model of these weights that is not trained |
"""
