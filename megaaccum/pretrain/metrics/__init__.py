"""A run's reports: the journal (log.jsonl), the progress line, TensorBoard / W&B / CSV, the summary.

`megaaccum.pretrain.metrics.log.RunLog` is the one object that the training loop talks to.
"""
