"""One optimizer step: micro-batches in, one divisor, one verdict on all ranks, one commit."""
