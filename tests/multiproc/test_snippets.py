"""The documentation's programs run: every page's blocks, in order, on one rank, with its sizes made small."""

from __future__ import annotations

import re
from typing import Any

from megaaccum.lab.verification.testing import run_ranks
from tests.support.snippets import ROOT, TOGETHER, blocks_of, losses_of, run_command

VOCABULARY, LENGTH, MICROBATCHES = 61, 24, 4
SMALL = {
    'pp=4, schedule="zbv"': "pp=1",
    "seq_length=4096": f"seq_length={LENGTH}",
    "global_batch_size=256": f"global_batch_size={MICROBATCHES}",
    "hidden_size=4096": "hidden_size=32",
    "width=4096": "width=32",
}
"""Texts of a snippet for a cluster, and their replacements on one rank."""


def names_of(page: str, folder: str) -> dict[str, Any]:
    """Names that the reader of a page provides: batches, and a model if the page builds none."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from examples.tiny_gpt import build_stages

    embedding = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))
    no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=4, **no_dropout)

    def microbatch(seed: int) -> dict[str, Any]:
        ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
        mask = (torch.arange(LENGTH) < LENGTH - seed).float()[None]
        if "huggingface" in page:
            return {"input_ids": ids, "attention_mask": mask.long()}
        return {"tokens": ids, "labels": ids.roll(-1), "loss_mask": mask, "lengths": torch.tensor([LENGTH])}

    return {
        "batches": [[microbatch(MICROBATCHES * step + i) for i in range(MICROBATCHES)] for step in range(2)],
        "folder": folder,
        "model": GPT2LMHeadModel(config).train() if "huggingface" in page else embedding,
        "stages_of": build_stages,
    }


def run_blocks(folder: str) -> list[float]:
    """Run all pages; the loss of each page's last step, where it makes steps. Raises what a block raises."""
    from megaaccum.distributed import groups

    losses = []
    for pages in TOGETHER:
        groups.destroy()
        names = names_of(pages[0], folder)
        for page in pages:
            for block in blocks_of(ROOT / page):
                source = block.source
                for large, small in SMALL.items():
                    source = source.replace(large, small)
                if block.runs:
                    exec(compile(source, f"{page}:{block.line}", "exec"), names)
        if "result" in names:
            losses.append(names["result"].loss)
        if "weights" in names:
            check_written(folder, names)
    return losses


def check_written(folder: str, names: dict[str, Any]) -> None:
    """Check that transformers loads what a page has written, with the trained weights."""
    import torch
    from transformers import AutoModelForCausalLM

    written = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    trained = dict(names["engine"].whole_weights())
    assert trained and all(torch.equal(written[name], each) for name, each in trained.items())


def test_the_documentation_runs(tmp_path):
    (losses,) = run_ranks(run_blocks, 1, str(tmp_path), timeout=120)
    assert len(losses) == 3 and all(3.0 < loss < 6.0 for loss in losses), losses


def test_what_is_made_small_is_written_somewhere():
    written = "".join((ROOT / page).read_text() for pages in TOGETHER for page in pages)
    assert [large for large in SMALL if large not in written] == []


def test_the_readme_shows_a_program_that_runs_by_the_command_beside_it(tmp_path):
    page = ROOT / "README.md"
    (program,) = blocks_of(page)
    command = re.search(r"`(torchrun .* (\w+\.py))`", page.read_text())
    assert command
    (tmp_path / command[2]).write_text(program.source)
    losses = losses_of(run_command(command[1], tmp_path))
    assert len(losses) == 10 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.15, losses
