"""A user's DeepSpeed JSON, reconciled with megaaccum's keys."""
