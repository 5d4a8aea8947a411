"""Keys of the step, the optimizer, the data and the run."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megaaccum.config.facts import Facts

Tokenizer = Literal[
    "GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer",
    "Llama2Tokenizer", "TikTokenizer", "NullTokenizer",
]  # fmt: skip
"""Kinds of tokenizers, as Megatron names them, whose vocabulary megaaccum can read."""


@dataclass(kw_only=True, slots=True)
class StepConfig:
    """When a step counts: the loss scale of FP16, and what happens to a step that went wrong."""

    loss_scale: Annotated[float | None, Facts(above=0, needs="fp16")] = None
    """A fixed loss scale for FP16; default: a dynamic one, by the four keys below."""
    initial_loss_scale: Annotated[float, Facts(above=0, needs="fp16")] = 65536.0
    """Dynamic loss scale of the first step."""
    min_loss_scale: Annotated[float, Facts(above=0, needs="fp16")] = 1.0
    """Floor of the dynamic loss scale. After an overflow there the step counts without the elements that overflowed
    (nonfinite zero), or the run ends (skip, drop_microbatch, raise)."""
    loss_scale_window: Annotated[int, Facts(at_least=1, needs="fp16")] = 2000
    """Steps in a row without an overflow after which the dynamic loss scale doubles."""
    hysteresis: Annotated[int, Facts(at_least=1, needs="fp16")] = 1
    """Overflows before the dynamic loss scale is halved, 1 for at once; counted afresh when it doubles, as in
    Megatron."""
    nonfinite: Literal["skip", "zero", "drop_microbatch", "raise", "off"] = "zero"
    """A gradient that is not finite: set its elements that are not to 0, skip the step, leave its micro-batch out, end
    the run, or none. While a dynamic loss scale can go down, zero skips too."""
    skipped_samples: Literal["consumed", "retried"] = "consumed"
    """Samples of a skipped step count as consumed, as in Megatron, or come again in the next step."""
    max_bad_steps_in_a_row: Annotated[int, Facts(at_least=0)] = 10
    """End the run after this many steps in a row that were not finite or that the guard skipped; 0 is no limit."""
    max_bad_steps: Annotated[int, Facts(at_least=0)] = 100
    """The same for all such steps of the run; 0 is no limit."""
    grad_norm_guard: Literal["off", "warn", "skip", "stop"] = "off"
    """The response to a gradient norm far above its moving average."""
    grad_norm_guard_deviations: Annotated[float, Facts(above=0, needs="grad_norm_guard")] = 6.0
    """The distance from the average, in standard deviations of the norm (a moving average too, at least 5 % of the
    average), that triggers it."""
    grad_norm_guard_window: Annotated[int, Facts(at_least=1, needs="grad_norm_guard")] = 100
    """Steps over which the averages are taken; the guard is silent until there are that many."""
    noise_scale_window: Annotated[int, Facts(at_least=0)] = 0
    """Report the gradient noise scale (arXiv 1812.06162, appendix A) of every step, averaged over this many, from the
    norms of the micro-batches' gradients: the batch size that it suggests, and its standard error. 0 is off."""
    short_batch: Literal["error", "pad", "drop"] = "error"
    """A rank with too few micro-batches: end the run, fill up with such of weight zero, or skip the step everywhere."""
    speculative_step: bool = False
    """Update before the norm's verdict and begin the next step's forwards; what the verdict refuses is taken back to
    the bit. For schedules whose ranks end one after the other (zbv). Holds a copy of weights, moments and gradients."""


_LION, _MUON, _SOAP, _MATRICES = "optimizer lion", "optimizer muon", "optimizer soap", "optimizer muon|soap"


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer and its schedule (Megatron's OptimizerParamScheduler)."""

    optimizer: Literal["adam", "lion", "muon", "soap"] = "adam"
    """adam: AdamW for every parameter. lion: Lion for every parameter (arXiv 2302.06675), with one moment in place of
    two. muon: Muon for the weight matrices of layers, each one whole on one rank, and AdamW for all others (embeddings,
    head, norms, biases, routers). soap: SOAP for these matrices (arXiv 2409.11321), with adam_beta1, adam_beta2 and
    adam_eps, and AdamW for all others."""
    lion_beta1: Annotated[float, Facts(at_least=0, below=1, needs=_LION)] = 0.95
    """Share of the moment in what an update is the sign of."""
    lion_beta2: Annotated[float, Facts(at_least=0, below=1, needs=_LION)] = 0.98
    """Decay of the moment, an average of gradients."""
    muon_matrices: Annotated[list[str], Facts(needs=_MATRICES)] = field(default_factory=list)
    """Patterns (`*`, `?`) of names that are matrices besides those of the rule, or with `!` before them are not; the
    last that fits holds."""
    muon_momentum: Annotated[float, Facts(at_least=0, below=1, needs=_MUON)] = 0.95
    """Decay of the momentum, an average of gradients."""
    muon_nesterov: Annotated[bool, Facts(needs=_MUON)] = False
    """Orthogonalise the gradient moved towards the momentum, not the momentum."""
    muon_split_qkv: Annotated[bool, Facts(needs=_MATRICES)] = True
    """Queries, keys and values of a fused weight are a matrix each."""
    muon_split_gated: Annotated[bool, Facts(needs=_MATRICES)] = True
    """Gate and up projection of a fused weight are a matrix each. Megatron orthogonalises them as one (false)."""
    muon_coefficient_type: Annotated[
        Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"], Facts(needs=_MUON)
    ] = "quintic"
    """Coefficients of the Newton-Schulz iteration, by their names in emerging-optimizers: simple is Keller Jordan's,
    quintic the five steps of that library."""
    muon_num_ns_steps: Annotated[int, Facts(at_least=1, needs=_MUON)] = 5
    """Steps of the iteration."""
    muon_fp32_matmul_prec: Annotated[Literal["medium", "high", "highest"], Facts(needs=_MUON)] = "medium"
    """Precision of its products: BF16 (medium), TF32 (high) or FP32."""
    muon_scale_mode: Annotated[Literal["spectral", "unit_rms_norm", "shape_scaling"], Facts(needs=_MUON)] = "spectral"
    """Scale of a matrix' update: sqrt(max(rows, columns)), sqrt(rows / columns), or sqrt(max(1, rows / columns))."""
    muon_extra_scale_factor: Annotated[float, Facts(above=0, needs=_MUON)] = 1.0
    """Another factor: with 0.2 and spectral an update is as large as AdamW's (Moonlight), and takes its lr."""
    muon_weight_decay_method: Annotated[Literal["decoupled", "l2"], Facts(needs=_MUON)] = "decoupled"
    """decoupled: matrices shrink by lr * weight_decay. l2: weight_decay * weights is added to their gradient."""
    muon_bucket_size: Annotated[int, Facts(at_least=1, needs=_MATRICES)] = 50_000_000
    """Elements of matrices that come to their owner in one exchange, while those of the one before are iterated; a
    matrix is never cut."""
    muon_scalar_lr: Annotated[float | None, Facts(above=0, needs=_MATRICES, group_rate=True)] = None
    """Peak learning rate of the parameters that AdamW steps; default lr. Their min_lr is in proportion."""
    muon_scalar_weight_decay: Annotated[float | None, Facts(at_least=0, needs=_MATRICES, group_rate=True)] = None
    """Weight decay of the parameters that AdamW steps; default weight_decay."""
    soap_shampoo_beta: Annotated[float, Facts(at_least=0, below=1, needs=_SOAP)] = 0.95
    """Decay of SOAP's second moments over rows and over columns."""
    soap_use_kl_shampoo: Annotated[bool, Facts(needs=_SOAP)] = True
    """Weigh them by each other's inverse (arXiv 2509.03378)."""
    lr: Annotated[float, Facts(required=True, above=0, lr_state="max_lr")] = 0.0
    """Peak learning rate. Required."""
    min_lr: Annotated[float, Facts(at_least=0, lr_state="min_lr")] = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: Annotated[float | None, Facts(above=0, group_rate=True)] = None
    """Peak learning rate of the input embedding and the output head, if it differs from lr."""
    decoupled_min_lr: Annotated[float | None, Facts(at_least=0, group_rate=True)] = None
    """Their learning rate at the end of the decay; default min_lr."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of names in the whole model, as in decoder.layers.[0-3].*: these parameters are not trained."""
    lr_mult: Annotated[list[str], Facts(group_rate=True)] = field(default_factory=list)
    """PATTERN=FACTOR: what fits has that part of the learning rate, as in embedding.*=0.1; the last that fits holds."""
    wd_mult: Annotated[list[str], Facts(group_rate=True)] = field(default_factory=list)
    """PATTERN=FACTOR: what fits has that part of the weight decay."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply every learning rate by the batch over its reference, or by the root of that."""
    lr_reference_batch_size: Annotated[int | None, Facts(at_least=1, needs="lr_scaling")] = None
    """Sequences of the global batch for which the learning rates are given."""
    lr_reference_tokens: Annotated[int | None, Facts(at_least=1, needs="lr_scaling")] = None
    """The same in tokens per step."""
    lr_scaling_follows_rampup: Annotated[bool, Facts(needs="lr_scaling", group_rate=True)] = False
    """During batch warm-up, scale by the batch of the step rather than by global_batch_size."""
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], Facts(lr_state="lr_decay_style")
    ] = "linear"
    """Shape of the decay."""
    lr_decay_iters: Annotated[int | None, Facts(at_least=1, lr_state="lr_decay_steps", in_samples=True)] = None
    """Steps until min_lr; default train_iters."""
    lr_decay_samples: Annotated[int | None, Facts(at_least=1)] = None
    """The same in samples, to the sample; instead of lr_decay_iters."""
    lr_warmup_iters: Annotated[int | None, Facts(at_least=0, lr_state="lr_warmup_steps", in_samples=True)] = None
    """Steps of linear warm-up."""
    lr_warmup_samples: Annotated[int | None, Facts(at_least=0)] = None
    """The same in samples; instead of lr_warmup_iters."""
    lr_warmup_fraction: Annotated[float | None, Facts(at_least=0, below=1)] = None
    """Warm-up as a share of the decay; instead of lr_warmup_iters."""
    lr_warmup_init: Annotated[float, Facts(at_least=0, lr_state="init_lr")] = 0.0
    """Learning rate at step 0."""
    lr_wsd_decay_iters: Annotated[
        int | None, Facts(at_least=1, needs="lr_decay_style WSD", lr_state="wsd_decay_steps", in_samples=True)
    ] = None
    """Steps of the final anneal of WSD."""
    lr_wsd_decay_samples: Annotated[int | None, Facts(at_least=1, needs="lr_decay_style WSD")] = None
    """The same in samples; instead of lr_wsd_decay_iters."""
    lr_wsd_decay_style: Annotated[
        Literal["linear", "cosine", "exponential", "minus_sqrt"],
        Facts(needs="lr_decay_style WSD", lr_state="lr_wsd_decay_style"),
    ] = "exponential"
    """Shape of the anneal of WSD."""
    weight_decay: Annotated[float, Facts(at_least=0)] = 0.01
    """Decoupled weight decay of matrices (biases and norms have none)."""
    apply_wd_to_qk_layernorm: Annotated[bool, Facts(group_rate=True)] = False
    """Decay the norms of queries and keys too."""
    start_weight_decay: Annotated[float | None, Facts(at_least=0, lr_state="start_wd")] = None
    """Weight decay at step 0; default weight_decay."""
    end_weight_decay: Annotated[float | None, Facts(at_least=0, lr_state="end_wd")] = None
    """Weight decay at the last step; default weight_decay."""
    weight_decay_incr_style: Annotated[Literal["constant", "linear", "cosine"], Facts(lr_state="wd_incr_style")] = (
        "constant"
    )
    """How weight decay moves between the two."""
    adam_beta1: Annotated[float, Facts(at_least=0, below=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Facts(at_least=0, below=1)] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, Facts(above=0)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, Facts(at_least=0)] = 1.0
    """Largest global L2 norm of the gradient; 0 is off."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The sources of samples (megatron.core.datasets)."""

    data_path: Annotated[list[str], Facts(per_host=True)] = field(default_factory=lambda: ["embedded"])
    """Prefixes of .bin/.idx pairs, or weight prefix weight prefix ...; 'embedded' is the text in the package."""
    train_data_path: Annotated[list[str] | None, Facts(per_host=True)] = None
    """Prefixes for training alone; instead of data_path and split."""
    valid_data_path: Annotated[list[str] | None, Facts(per_host=True)] = None
    """Prefixes for validation alone."""
    test_data_path: Annotated[list[str] | None, Facts(per_host=True)] = None
    """Prefixes for testing alone."""
    split: str = "969,30,1"
    """Shares of train, valid, test in data_path."""
    mock_data: bool = False
    """Made-up samples (Megatron's MockGPTDataset) in place of data_path, to measure with."""
    tokenizer_type: Tokenizer | None = None
    """Megatron's name of the kind of tokenizer; default: a Hugging Face tokenizers file."""
    vocab_file: Annotated[str | None, Facts(per_host=True)] = None
    """vocab.json of a GPT-2 tokenizer."""
    merge_file: Annotated[str | None, Facts(per_host=True)] = None
    """merges.txt of a GPT-2 tokenizer."""
    tokenizer_model: Annotated[str | None, Facts(per_host=True)] = None
    """A Hugging Face tokenizers file (tokenizer.json), or a folder with one; default: the one beside the dataset."""
    data_cache_path: Annotated[str | None, Facts(per_host=True)] = None
    """Folder for the index files that the dataset builds; default: a cache folder inside save or output_dir."""
    mmap_bin_files: Annotated[bool, Facts(per_host=True)] = True
    """Map the .bin files into memory rather than read them."""
    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""
    reset_position_ids: bool = False
    """Restart positions after an end-of-document token."""
    reset_attention_mask: bool = False
    """Keep attention inside documents."""
    sft: bool = False
    """Supervised fine-tuning: the data paths are JSONL files of conversations, made into tokens by the chat template
    beside tokenizer_model and packed into rows."""
    assistant_only_loss: Annotated[bool, Facts(needs="sft")] = True
    """Train the responses alone, and not the prompts."""
    chat_template_path: Annotated[str | None, Facts(needs="sft", per_host=True)] = None
    """A chat template (Jinja) in place of the tokenizer's."""
    fim_data: bool = False
    """Fill in the middle: cut samples in three and move the middle to the end (Megatron's GPTFIMDataset)."""
    fim_rate: Annotated[float, Facts(above=0, at_most=1, needs="fim_data")] = 0.5
    """Share of the texts that are cut."""
    fim_spm_rate: Annotated[float, Facts(above=0, at_most=1, needs="fim_data")] = 0.5
    """Share of those in which the suffix comes before the prefix."""
    fim_split_sample: Annotated[str | None, Facts(needs="fim_data")] = None
    """A token between parts of a text, each of which is cut (files of a repository)."""
    fim_fragment_rate: Annotated[float | None, Facts(at_least=0, at_most=1, needs="fim_split_sample")] = None
    """Share of such parts that are cut."""
    fim_no_prefix: Annotated[str | None, Facts(needs="fim_data")] = None
    """Texts that begin with this are left whole."""
    fim_prefix_token: Annotated[str, Facts(needs="fim_data")] = "<fim_prefix>"
    """The token before the prefix."""
    fim_middle_token: Annotated[str, Facts(needs="fim_data")] = "<fim_middle>"
    """The token before the middle."""
    fim_suffix_token: Annotated[str, Facts(needs="fim_data")] = "<fim_suffix>"
    """The token before the suffix."""
    fim_pad_token: Annotated[str, Facts(needs="fim_data")] = "<fim_pad>"
    """The token at the end of a sample whose text became shorter."""
    fim_eod_token: Annotated[str, Facts(needs="fim_data")] = "<|endoftext|>"
    """The token between the texts of a sample."""
    num_workers: Annotated[int | None, Facts(at_least=0, per_host=True)] = None
    """Micro-batches that a thread prepares ahead, and at least a whole step's; 0 prepares them when asked for. Default:
    2 beside a GPU, 0 without one."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """The run: how long, what is written, when it stops."""

    train_iters: Annotated[int, Facts(required=True, at_least=1, lr_state="wd_incr_steps", in_samples=True)] = 0
    """Optimizer steps of the whole run; the learning-rate schedule is laid out over them. Required."""
    max_steps: Annotated[int | None, Facts(at_least=1)] = None
    """Stop after this many steps of this start, before train_iters (the schedule stays as it is)."""
    eval_interval: Annotated[int, Facts(at_least=0)] = 1000
    """Steps between evaluations; 0 is off."""
    eval_iters: Annotated[int, Facts(at_least=0)] = 100
    """Global batches per evaluation; 0 is off."""
    sample_every: Annotated[int, Facts(at_least=0)] = 0
    """Steps between samples: a short text that the model continues, printed; 0 is off."""
    text_comparisons_every: Annotated[int, Facts(at_least=0)] = 0
    """Steps between evaluations of the likelihood comparisons in the package; 0 is off."""
    output_dir: Annotated[str, Facts(per_host=True)] = "runs/default"
    """Folder of logs, pictures and, unless save is set, checkpoints."""
    save: Annotated[str | None, Facts(per_host=True)] = None
    """Folder of checkpoints; default output_dir/checkpoints."""
    load: Annotated[str | None, Facts(per_host=True)] = None
    """Folder to resume from, or one checkpoint's own, also of Megatron's (torch_dist) or DeepSpeed's (ZeRO, universal);
    default: save, when it holds a checkpoint."""
    load_step: Annotated[int | None, Facts(at_least=0)] = None
    """Resume from the checkpoint of this step, in every start until it is removed; default: the current checkpoint."""
    init_from: Annotated[str | None, Facts(per_host=True)] = None
    """Folder of a Hugging Face model, or of a checkpoint of Megatron's (torch_dist) or DeepSpeed's (ZeRO, universal),
    whose weights the run begins with, if there is no checkpoint to resume from."""
    exit_on_missing_checkpoint: bool = False
    """End the run if `load` holds no checkpoint, rather than start afresh."""
    save_interval: Annotated[int, Facts(at_least=0)] = 0
    """Steps between checkpoints; 0 leaves only the one of save_at_end."""
    save_at_end: bool = True
    """A checkpoint when the run ends or gets a signal to stop."""
    keep_last: Annotated[int, Facts(at_least=0)] = 2
    """Checkpoints kept; 0 keeps all."""
    async_save: bool = False
    """Write checkpoints in the background."""
    save_retain_interval: Annotated[int | None, Facts(at_least=1)] = None
    """Checkpoints at multiples of these steps are kept for good, in spite of keep_last."""
    exit_interval: Annotated[int | None, Facts(at_least=1)] = None
    """End this start when the step is a multiple of it, after a checkpoint."""
    exit_duration_in_mins: Annotated[float | None, Facts(above=0)] = None
    """End this start this many minutes after its launch, after a checkpoint."""
    finetune: bool = False
    """Take the weights alone from `load`, and begin at step 0, until `save` has a checkpoint of the run."""
    reset_iteration: bool = False
    """Take weights and optimizer state from `load`, and begin at step 0, until `save` has a checkpoint of the run."""
    no_load_optim: bool = False
    """Leave optimizer state and learning-rate schedule of the checkpoint out."""
    override: list[Literal["lr_schedule", "batch", "data", "model", "optimizer"]] = field(default_factory=list)
    """Continue from a checkpoint of another learning-rate schedule, global batch, data, model (keys that no weight's
    shape shows) or optimizer; the log names what differs. A difference that is not asked for ends the start."""
    override_opt_param_scheduler: bool = False
    """The schedule of this configuration holds if the checkpoint's differs (like override lr_schedule)."""
    use_checkpoint_opt_param_scheduler: bool = False
    """The schedule of the checkpoint holds if this configuration's differs."""
    no_load: bool = False
    """Start afresh even if a checkpoint is there."""
    verify_at_start: bool | None = None
    """Before the first step, and again after a restart on another layout, compare the step's gradient with that of
    another split of the same samples, which takes as long as two steps; a run whose gradients differ ends before its
    first step. Default: on GPUs, where no test of megaaccum has run, if another split has to have the same gradient."""
    seed: Annotated[int, Facts(at_least=0)] = 1234
    """Seed of weights, dropout and sample order."""
    rng: Literal["sample", "megatron"] = "sample"
    """The source of random numbers of dropout and router jitter. sample: seed, step, micro-batch of the global batch
    and layer, so that masks are the same in every layout and after a resume. megatron: random states of each rank."""
    schedule_trace: Annotated[str | None, Facts(per_host=True)] = None
    """Write the second flush, as run and as planned, to this file in Chrome's trace format (megaaccum's schedules)."""
    log_interval: Annotated[int, Facts(at_least=1)] = 10
    """Steps between progress lines."""
    record_interval: Annotated[int, Facts(at_least=1)] = 1
    """Steps between two lines in log.jsonl. Steps that went wrong, that are saved after, or that are the last before
    another line are always there."""
    rank_report_interval: Annotated[int, Facts(at_least=0)] = 10
    """Steps between two looks at all ranks: late ones, and bytes and memory that leave the plan; 0 is off."""
    straggler_threshold: Annotated[float, Facts(above=0, needs="rank_report_interval")] = 0.2
    """A rank is late that waits for data, or computes, longer than its peers by this share of a step, in every step."""
    tensorboard_dir: Annotated[str | None, Facts(per_host=True)] = None
    """Write TensorBoard events here."""
    wandb_project: Annotated[str | None, Facts(per_host=True)] = None
    """Write to this Weights & Biases project, with the resolved configuration."""
    csv_dir: Annotated[str | None, Facts(per_host=True)] = None
    """Write CSV metrics here."""
    step_timeout_seconds: Annotated[float, Facts(at_least=0)] = 0.0
    """A step that takes longer ends the run with every rank's stack; 0 is off. The first step of a start, in which
    kernels are compiled and ranks connect, may take nine tenths of distributed_timeout_minutes."""
    num_threads: Annotated[int | None, Facts(at_least=1, per_host=True)] = None
    """CPU threads per rank in the CPU lane; default: cores / local ranks."""
    world_size: Annotated[int | None, Facts(at_least=1, planned=True, per_host=True)] = None
    """Ranks over all hosts that the file was made for: the default of `check` and `plan`, and of `megaaccum train` on a
    machine without GPUs. A launcher decides how many there are."""
    nproc_per_node: Annotated[int | None, Facts(at_least=1, planned=True, per_host=True)] = None
    """Local ranks that `megaaccum train` starts; default: the GPUs, or tp * cp * pp on a machine without."""
