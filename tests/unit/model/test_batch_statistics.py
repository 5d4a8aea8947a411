"""Modules whose output depends on the micro-batch they share are named."""

import torch

from megaaccum.step.chunk_config import batch_statistics


def test_a_module_with_batch_statistics_is_named():
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LayerNorm(2))
    (text,) = batch_statistics(chunk)
    assert "1 (BatchNorm1d)" in text
    assert "statistics of each micro-batch" in text


def test_a_model_without_them_is_not_warned_of():
    assert batch_statistics(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))) == []
