"""The parts of Megatron-LM's `megatron.training` that the models are built with (megatron-core 0.19.2).

To be imported from here: importing `megatron.training` itself gives the program's root logger a handler and level INFO.
"""

from __future__ import annotations

from megaaccum.distributed import quiet

with quiet.root_logger_kept():
    from megatron.training.models import gpt as gpt_builder
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
    from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig

__all__ = ["GPTModelBuilder", "GPTModelConfig", "HybridModelBuilder", "HybridModelConfig", "gpt_builder"]
