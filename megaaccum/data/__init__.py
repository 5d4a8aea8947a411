"""Where samples come from: corpus and indexed files, Megatron's datasets over them, and the loader of micro-batches.

Nothing here imports torch or Megatron before it is needed; `megaaccum data build` needs neither.
"""
