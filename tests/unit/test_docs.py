"""Files, commands, flags of the configuration and the picture that the README and docs/ name exist."""

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.config.keys import ALIASES, SECTIONS
from megaaccum.lab.search.profile import LayerCost, Profile, write_profile
from tests.support.check import run
from tests.support.snippets import NOT_RUN, ON_THEIR_OWN, TOGETHER, blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LAUNCHERS_FLAGS = {
    "hostfile",
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "num_accelerators",
    "master_addr",
}
COMMANDS_FLAGS = {
    "check": {"world-size", "hostfile", "json", "record"},
    "build": {"input", "output-prefix", "tokenizer", "train-tokenizer", "vocab-size", "append-eod"},
    "train": {"config"},
    "verify": {"layout", "world-size", "shrink", "whole", "steps", "json", "picture", "weights", "run", "no-logits"},
    "config": {"from-hf"},
    "export": {"hf", "consolidated", "checkpoint", "family", "dtype", "max_shard_size"},
    "generate": {"prompt", "chat", "max_new_tokens", "temperature", "top_k", "top_p", "checkpoint"},
    "keys": set(),
    "plan": {
        "gpus",
        "gpu",
        "hostfile",
        "rank",
        "fix",
        "explain",
        "why-not",
        "write",
        "row",
        "profile",
        "even",
        "wide",
        "search",
    },
    "tune": {"gpus", "hostfile", "top", "knob", "settle", "write", "calibrate", "time-limit", "wide"},
    "calibrate": {"like", "output", "layers", "dp"},
    "schedule": {"pp", "microbatches", "schedule", "compare", "cost", "profile", "cut", "search", "csv", "png"}
    | {"config", "write"},
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def broken_links(page: Path, text: str) -> list[str]:
    """Targets of `text`'s relative links that are no file beside `page`, or no heading of that file."""
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        path = page.parent / target if target else page
        if "://" in target or (path.exists() and (not anchor or anchor in anchors(path.read_text()))):
            continue
        broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def shell_lines(text: str) -> list[str]:
    """Lines of the fenced blocks without a language, comments cut off."""
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]


def problems(line: str) -> list[str]:
    """Parts of a shown command that do not exist; empty for a line that is no command of this repository."""
    words = line.split()
    if line.startswith("make "):
        return [] if re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) else [line]
    if line.startswith("megaaccum "):
        command, _ = cli.find(words[1:])
        known = COMMANDS_FLAGS.get(command.split()[-1], set())
    elif "launch/pretrain_gpt.py" in words or line.startswith("python -m megaaccum.train"):
        known = LAUNCHERS_FLAGS | COMMANDS_FLAGS["train"]
    else:
        return []
    files = [word for word in words if re.match(r"(configs|launch|docs)/", word) and not (ROOT / word).exists()]
    if words[0] == "srun":  # its own flags come before the program
        words = words[words.index("python") :]
    flags = [word[2:] for word in words if word.startswith("--") and word[2:] not in known]
    return files + [flag for flag in flags if not is_key(flag)]


def is_key(name: str) -> bool:
    """Whether `name` is a key of the configuration, or another name of one."""
    keys = {key for section in SECTIONS.values() for key in section.__dataclass_fields__}
    return name in keys or name in ALIASES


@each_page
def test_links_lead_to_files(page):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found():
    text = "[a](docs/nowhere.md) [b](README.md#what-it-costs) [c](#what-it-pays)"
    assert broken_links(ROOT / "README.md", text) == ["docs/nowhere.md", "#what-it-pays"]


@each_page
def test_python_that_is_shown_compiles(page):
    for block in blocks_of(page):
        compile(block.source, f"{name_of(page)}:{block.line}", "exec")


def test_blocks_are_found_with_their_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"text\n\n```python\nx = (\n```\n\n{NOT_RUN}\n```python\ny = 1\n```\n\n```\nmake demo\n```\n")
    wrong, shown = blocks_of(page)
    assert (wrong.line, wrong.runs, shown.source, shown.line, shown.runs) == (4, True, "y = 1\n", 9, False)
    with pytest.raises(SyntaxError):
        compile(wrong.source, "page.md", "exec")


@each_page
def test_snippets_that_use_an_engine_run(page):
    uses = any(block.runs and re.search(r"\binitialize\(|\bengine\.", block.source) for block in blocks_of(page))
    assert not uses or name_of(page) in {*ON_THEIR_OWN, *(name for pages in TOGETHER for name in pages)}


@each_page
def test_commands_that_are_shown_exist(page):
    assert [problem for line in shell_lines(page.read_text()) for problem in problems(line)] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("make coffee", "make coffee"),
        ("megaaccum train configs/nowhere.yaml", "configs/nowhere.yaml"),
        ("megaaccum train CONFIG --grad_acum_steps 8", "grad_acum_steps"),
        ("deepspeed launch/pretrain_gpt.py --confg C", "confg"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line, problem):
    assert problems(line) == [problem]


def quick_commands() -> list[str]:
    """The shown commands that neither train nor need files of the reader's: once each."""
    lines = [line for page in PAGES for line in shell_lines(page.read_text())]
    quick = [
        line for line in lines if line.startswith(("megaaccum check configs", "megaaccum plan c", "megaaccum sch"))
    ]
    return list(dict.fromkeys(quick))


@pytest.mark.parametrize("line", quick_commands())
def test_commands_that_are_shown_run(line, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("hosts", "HOSTS"):
        (tmp_path / name).write_text("".join(f"node{i} slots=8\n" for i in range(64)))
    cost = LayerCost(forward=1, input_grad=1, weight_grad=1)
    layers = 32 if "--write" in line else 8  # those of the configuration, where there is one
    write_profile(Profile(pattern="E" + "T" * layers + "L", kinds=dict.fromkeys("ETL", cost)), tmp_path / "layers.json")
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()[1:]) == 0


def test_the_two_commands_come_by_line_40_of_the_readme():
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make demo" in head and "make test" in head


def test_every_page_is_in_the_site():
    docs, listed = ROOT / "docs", (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(docs)) for page in PAGES if page.is_relative_to(docs)}
    assert set(re.findall(r"([\w/-]+\.md)", listed)) == pages


def test_the_picture_runs_1f1b_without_overlap():
    picture = runpy.run_path(str(ROOT / "docs" / "make_picture.py"))
    for stage, blocks in enumerate(picture["simulate"]()):
        assert [(block.kind, block.index) for block in blocks] == picture["order"](stage)
        assert all(one.end <= other.start for one, other in pairwise(blocks))


def test_the_quickstart_shows_the_plan_as_it_is():
    plan = run(ROOT / "configs" / "tiny_cpu.yaml", world_size=4)
    batch = plan[plan.index("Batch\n") :].split("\n\n")[0]
    assert f"```\n{batch}\n```" in (ROOT / "docs" / "start" / "quickstart.md").read_text()


def test_the_import_paths_of_the_changelog_lead_to_modules():
    table = re.findall(r"^  \| `([\w.]+)` \| `([\w.]+)`.* \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert len(table) > 40
    package = ROOT / "megaaccum"
    missing = [
        new for _, new in table if not any(package.glob(new.replace(".", "/") + end) for end in (".py", "/__init__.py"))
    ]
    assert missing == [] and len(dict(table)) == len(table)
