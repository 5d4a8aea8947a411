"""Text from what was trained: the current weights of a run, or a Hugging Face folder, under any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaaccum.checkpoint import save_load
from megaaccum.config import Config
from megaaccum.config.keys import all_keys, value
from megaaccum.config.source import COMMAND_LINE
from megaaccum.distributed.start import end_process_group
from megaaccum.engine import Engine
from megaaccum.errors import CheckpointError, ConfigError, is_for_memory, raise_problems
from megaaccum.pretrain.data.chats import ChatTokenizer
from megaaccum.pretrain.data.sources import read_run_tokenizer
from megaaccum.pretrain.data.tokenizer import end_of_document
from megaaccum.pretrain.metrics import receipts
from megaaccum.pretrain.training.run_folder import checkpoint_folder
from megaaccum.pretrain.training.sampling import Draw, sample
from megaaccum.pretrain.weights import config_json, foreign, inference

if TYPE_CHECKING:
    import tokenizers

_OF_TRAINING = frozenset(
    "recompute_granularity recompute_method recompute_num_layers recompute_modules gradient_checkpointing"
    " moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy gradient_accumulation_fusion"
    " context_parallel_size microbatch_group_size_per_vp_stage overlap_p2p_comm batch_p2p_comm"
    " overlap_moe_expert_parallel_comm distributed_timeout_minutes".split()
)
"""Keys of a run's model and layout that only training heeds. Capacity is left out, as padding would take places of
tokens."""
_HEEDED = frozenset(
    "bf16 fp16 params_dtype deterministic seed nproc_per_node world_size transformer_impl attention_backend"
    " moe_token_dispatcher_type moe_grouped_gemm".split()
)
"""Keys besides the layout, FP8 and fusions that a command line may set: how the same model is computed."""


@dataclass(frozen=True)
class Generation:
    """A request for text. source: output_dir of a run, or a folder with a config.json; words: command-line
    words of the configuration; checkpoint: of a run, default the current one; chat: prompts are a user's messages."""

    source: Path
    prompts: list[str]
    max_new_tokens: int
    words: Sequence[str] = ()
    checkpoint: Path | None = None
    chat: bool = False

    @cached_property
    def config(self) -> Config:
        """The configuration, not resolved yet, for rows that hold the longest prompt and what is generated. Raises
        ConfigError."""
        config = inference.config_of(self._keys | {"output_dir": str(self.source)}, str(self.source), self.words)
        raise_problems(list(self._refused(config)))
        layout = config.parallel
        tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        width = max(map(len, self.prompt_ids)) + self.max_new_tokens
        cut = tp * (2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1)
        config.model.seq_length = -(-width // cut) * cut
        config.batch.global_batch_size = 2 * pp * max(layout.expert_model_parallel_size, 1)
        return config

    @property
    def is_run(self) -> bool:
        """Whether the source is a run, not a Hugging Face folder."""
        return not (self.source / "config.json").is_file()

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary before padding."""
        return int(self._receipt["data"]["vocab_size"] if self.is_run else self._json["vocab_size"])

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """The tokens of each prompt. Raises DataError without a tokenizer that makes them, ConfigError for none."""
        if self.chat:
            return [self._chat_tokenizer.prompt(prompt) for prompt in self.prompts]
        found = [self._tokenizer.encode(prompt).ids for prompt in self.prompts]
        if not all(found):
            raise ConfigError("a prompt is empty, and the tokenizer begins a text with no token: give it a word")
        return found

    def text_of(self, ids: list[int]) -> str:
        """The text of token ids, special ones left out."""
        return str(self._tokenizer.decode(ids))

    @cached_property
    def stops(self) -> set[int]:
        """The tokens that end a text: those of generation_config.json or config.json, and the tokenizer's."""
        folder = self._model_folder
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            if folder is not None and (folder / name).is_file():
                found |= set(config_json.end_ids(config_json.read_object(folder / name)))
        if self.chat:
            found |= self._chat_tokenizer.stops
        return found or {end for end in [end_of_document(self._tokenizer)] if end is not None}

    def load(self, engine: Engine) -> None:
        """Load the weights. Collective over the world; raises CheckpointError on every rank."""
        if not self.is_run:
            foreign.load(engine, self.source, vocab_size=self.vocab_size)
            return
        engine.shape = save_load.shape_of(engine.plan, self.vocab_size)
        folder = self.checkpoint or checkpoint_folder(self._run_config)
        if not engine.load(folder):
            raise CheckpointError(f"{folder} holds no checkpoint: give --checkpoint the folder of one")

    def _refused(self, config: Config) -> Iterator[str]:
        """Texts against words of the command line that would make another model of the weights, or change nothing."""
        trained = self._run_config if self.is_run else inference.config_of(self._keys, "")
        if self.checkpoint is not None and not self.is_run:
            yield f"--checkpoint {self.checkpoint}: no effect, as {self.source} is a Hugging Face folder: leave it out."
        for name in [each for each, origin in config.origin.items() if origin == COMMAND_LINE]:
            is_free = all_keys()[name].section in ("parallel", "quantization") or name.endswith("_fusion")
            if not (is_free or name in _HEEDED or (new := value(config, name)) == (old := value(trained, name))):
                yield f"{name} is {new}, but {self.source} has {old}: leave it out: only layout and precision change."

    # --- where it comes from ---

    @cached_property
    def _receipt(self) -> dict[str, Any]:
        return receipts.read_all(self.source)[-1]

    @cached_property
    def _json(self) -> config_json.Keys:
        return config_json.read_json(self.source)

    @cached_property
    def _run_config(self) -> Config:
        """The run's configuration; for a Hugging Face folder, one that names it as the model that it began from."""
        if self.is_run:
            return receipts.config_of(self._receipt, self.source)
        config = Config()
        config.run.init_from = config.data.tokenizer_model = str(self.source)
        return config

    @property
    def _model_folder(self) -> Path | None:
        """The folder of the Hugging Face model, or from which the run began."""
        return Path(self._run_config.run.init_from) if self._run_config.run.init_from else None

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return read_run_tokenizer(self._run_config, "generate")

    @cached_property
    def _chat_tokenizer(self) -> ChatTokenizer:
        model = self._run_config.data.tokenizer_model or str(self._model_folder or self.source)
        return ChatTokenizer(replace(self._run_config.data, tokenizer_model=model))

    @cached_property
    def _keys(self) -> dict[str, Any]:
        """The keys of the model, and of a run's layout."""
        if not self.is_run:
            return config_json.keys_from(self._json) | {"make_vocab_size_divisible_by": 1}
        sections = self._receipt["configuration"]
        written = {
            name: facts["value"]
            for section in ("model", "parallel")
            for name, facts in sections[section].items()
            if facts["from"] not in ("default", "derived") and name not in _OF_TRAINING
            # A table is of one number of micro-batches: Megatron's own schedule takes its place.
            if name != "schedule" or not facts["value"].endswith(".csv")
        }
        dtype = {"params_dtype": sections["sharding"]["params_dtype"]["value"]}
        table = {"max_position_embeddings": self._run_config.model.max_position_embeddings}
        return written | self._receipt["megatron"] | dtype | table


def generate(generation: Generation, draw: Draw, world_size: int) -> Iterator[tuple[str, str]]:
    """(prompt, continuation) of each prompt, the same on every rank. Collective over the world."""
    engine = inference.engine_of(generation.config, world_size=world_size, vocab_size=generation.vocab_size)
    generation.load(engine)
    for text, ids in zip(generation.prompts, generation.prompt_ids, strict=True):
        try:
            drawn = sample(
                engine, ids, vocab_size=generation.vocab_size, num_tokens=generation.max_new_tokens, draw=draw,
                stops=generation.stops,
            )  # fmt: skip
        except (MemoryError, RuntimeError) as error:
            if not is_for_memory(error):
                raise
            raise ConfigError(
                f"memory does not hold a row of {engine.plan.batch.seq_length} tokens, the longest prompt and"
                f" --max_new_tokens {generation.max_new_tokens}: give a lower number ({error})"
            ) from None
        yield text, generation.text_of(drawn)
    end_process_group()
