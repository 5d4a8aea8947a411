"""Reading the flags of Megatron-LM and Megatron-DeepSpeed, from a list of words or a file, into megaaccum's keys.

Names and forms of the flags are those of megatron-core 0.19's megatron.training.arguments and of
megatron/arguments.py in deepspeedai/Megatron-DeepSpeed; megatron_flags.yaml lists them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaaccum.config.keys import Key, all_keys, canonical
from megaaccum.errors import ConfigError
from megaaccum.interop.megatron_reading import Given, Reading, Unresolved
from megaaccum.interop.megatron_rules import RULES
from megaaccum.interop.megatron_table import Family, Flag, Treatment, flags, spelling
from megaaccum.interop.shell import ShellError, read_words


def parse(
    argv: Sequence[str], *, base_dir: str | os.PathLike[str] = ".", beside: Mapping[str, object] | None = None
) -> tuple[dict[str, object], list[str]]:
    """The keys that a list of Megatron flags sets, and what is wrong with the list.

    Args:
        argv: flags and values, as Megatron's parser would get them or as `read_argument_file` gives them. megaaccum's
            own keys may stand among them as flags.
        base_dir: folder against which the files are found that flags name (--deepspeed_config, --data-args-path).
        beside: keys given elsewhere on the same command line that flags may need (global_batch_size for
            --train-samples).

    Returns:
        A flat mapping of keys to typed values (with `deepspeed`: the dictionary in the file of --deepspeed_config),
        and one text per problem. `read_flags` gives the notes on flags without effect as well.
    """
    reading = read_flags(argv, base_dir=base_dir, beside=beside)
    return reading.values, reading.problems


def read_flags(
    argv: Sequence[str], *, base_dir: str | os.PathLike[str] = ".", beside: Mapping[str, object] | None = None
) -> Reading:
    """As `parse`, with the notes: what was accepted without effect and why, and which of two equal flags holds."""
    reading = Reading(Path(base_dir), beside or {})
    own_keys = _sort_groups(_group(argv, reading), reading)
    _note_ignored(reading)
    _refuse(reading)
    for given in reading.given.values():
        _apply(given, reading)
    for group in own_keys:
        _put_own_key(group, reading)
    for title, rule in RULES.items():
        # What a rule would say of flags of which one is not known could be wrong.
        if not any(flags()[name].family.title == title for name in map(spelling, reading.unresolved)):
            rule(reading)
    return reading


def read_argument_file(path: str | os.PathLike[str]) -> list[str]:
    """The words of a file of flags (one or many per line, with comments), or of a shell script that starts training.

    A script is read, never executed: its assignments, arrays, arithmetic and simple conditions are followed, and the
    environment counts as empty. A word that still depends on something else comes back as an `Unresolved`, which
    `parse` reports with the reason.

    Raises:
        ConfigError: the file cannot be read, is not closed (quotes, parentheses), or holds no flags.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return read_words(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the argument file {path}: {reason}.") from None
    except ShellError as error:
        raise ConfigError(f"{path}: {error}") from None


# --- words into flags with values ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """A flag as written and the words up to the next flag."""

    written: str
    values: list[str] = field(default_factory=list)


def _group(argv: Iterable[str], reading: Reading) -> list[_Group]:
    groups: list[_Group] = []
    for word in argv:
        if isinstance(word, Unresolved) and (word.startswith("--") or not groups) and "=" not in word:
            reading.problems.append(_unresolved("a flag,", [word]))
        elif word.startswith("--") and len(word) > 2:
            written, equals, value = word.partition("=")
            if equals and isinstance(word, Unresolved):
                value = Unresolved(value, word.reasons)
            groups.append(_Group(written, [value] if equals else []))
        elif groups:
            groups[-1].values.append(word)
        else:
            reading.problems.append(f"unexpected {word}: flags are written --name value.")
    return groups


def _sort_groups(groups: list[_Group], reading: Reading) -> list[tuple[Key, _Group]]:
    """Put the table's flags into `reading.given` and give back those that are megaaccum's own keys."""
    own_keys = []
    for group in groups:
        flag = flags().get(spelling(group.written))
        if flag is not None:
            _give(flag, group, reading)
        elif (key := _own_key(group.written)) is not None:
            own_keys.append((key, group))
        else:
            reading.problems.append(f"unknown flag {group.written}{_did_you_mean(group.written)}.")
    return own_keys


def _give(flag: Flag, group: _Group, reading: Reading) -> None:
    taken, left = group.values, []
    if flag.count == "none":
        taken, left = [], group.values
    elif flag.count in ("one", "?"):
        taken, left = group.values[:1], group.values[1:]
    if flag.count in ("one", "+") and not taken:
        reading.problems.append(f"{group.written} needs a value.")
        return
    if left:
        takes = "no value" if flag.count == "none" else "one value"
        reading.problems.append(f"{group.written} takes {takes}: unexpected {' '.join(left)}{_hint(left)}.")
    unknown = [word for word in taken if isinstance(word, Unresolved)]
    if unknown and flag.treatment != "ignored":
        reading.problems.append(_unresolved(group.written, unknown))
        reading.unresolved.add(flag.name)
        return
    given = Given(flag, group.written, tuple(taken))
    before = reading.given.get(flag.name)
    if before is not None and before.values != given.values:
        reading.notes.append(f"{before} and {given}: the last one holds, as in Megatron.")
    reading.given[flag.name] = given


def _unresolved(where: str, words: Sequence[Unresolved]) -> str:
    reasons = dict.fromkeys(reason for word in words for reason in word.reasons)
    return f"{where} {' '.join(words)}: {'; '.join(reasons)}. Write its value into the file."


def _hint(left: Sequence[str]) -> str:
    unknown = [word for word in left if isinstance(word, Unresolved)]
    return f" ({'; '.join(reason for word in unknown for reason in word.reasons)})" if unknown else ""


def _own_key(written: str) -> Key | None:
    plain = written.removeprefix("--").replace("-", "_")
    name = canonical(plain)
    if name is None and plain.startswith("no_"):
        positive = canonical(plain.removeprefix("no_"))
        if positive is not None and all_keys()[positive].annotation is bool:
            name = positive
    return all_keys()[name] if name is not None else None


def _did_you_mean(written: str) -> str:
    names = dict.fromkeys([*flags(), *(spelling(name) for name in all_keys())])
    near = difflib.get_close_matches(spelling(written), names, n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""


# --- flags into keys -------------------------------------------------------------------------------------------------


def _apply(given: Given, reading: Reading) -> None:
    if given.flag.treatment == "mapped":
        _put_mapped(given, reading)
    elif given.flag.treatment == "ignored" and given.flag.kind in ("int", "float"):
        for value in given.values:
            reading.as_number(Given(given.flag, given.written, (value,)))


def _put_mapped(given: Given, reading: Reading) -> None:
    if given.flag.family.why:
        reading.notes.append(f"{given}: {given.flag.family.why}")
    for key, constant in given.flag.sets:
        if constant is not None:
            reading.put(key, constant, str(given))
        elif "list[str]" in str(all_keys()[key].annotation):
            reading.put(key, list(given.values), str(given))
        elif len(given.values) > 1:
            reading.problems.append(f"{given}: {key} takes one value, not {len(given.values)}.")
        else:
            reading.put(key, given.values[0], str(given))


def _is_default(given: Given) -> bool:
    """Whether a refused flag only repeats what Megatron does without it."""
    flag = given.flag
    if flag.kind == "onoff":
        return spelling(given.written) == spelling(flag.names[1])
    if flag.default is None or len(given.values) != 1:
        return False
    if flag.kind in ("int", "float"):
        try:
            return float(given.values[0]) == float(flag.default)
        except ValueError:
            return False
    return given.values[0].lower() == flag.default.lower()


def _put_own_key(item: tuple[Key, _Group], reading: Reading) -> None:
    key, group = item
    unknown = [word for word in group.values if isinstance(word, Unresolved)]
    if unknown:
        reading.problems.append(_unresolved(group.written, unknown))
        return
    writer = " ".join((group.written, *group.values))
    negated = canonical(group.written.removeprefix("--")) is None
    if key.annotation is bool and not group.values:
        reading.put(key.name, not negated, writer)
    elif negated or not group.values:
        reading.problems.append(f"{writer}: {group.written} {'takes no value' if negated else 'needs a value'}.")
    elif "list[" in str(key.annotation):
        reading.put(key.name, group.values if len(group.values) > 1 else group.values[0], writer)
    elif len(group.values) > 1:
        reading.problems.append(f"{writer}: {group.written} takes one value, not {len(group.values)}.")
    else:
        reading.put(key.name, group.values[0], writer)


def _note_ignored(reading: Reading) -> None:
    for family, flags_given in _by_family(reading, "ignored"):
        reading.notes.append(f"without effect: {', '.join(given.written for given in flags_given)}. {family.why}")


def _refuse(reading: Reading) -> None:
    for family, flags_given in _by_family(reading, "refused"):
        refused = [str(given) for given in flags_given if not _is_default(given)]
        if refused:
            reading.problems.append(f"{', '.join(refused)}: {family.why}; {family.instead}.")


def _by_family(reading: Reading, treatment: Treatment) -> list[tuple[Family, list[Given]]]:
    """The flags of one treatment, one row per family: scripts hold dozens of flags that share a reason."""
    rows: dict[str, tuple[Family, list[Given]]] = {}
    for given in reading.given.values():
        if given.flag.treatment == treatment:
            rows.setdefault(given.flag.family.title, (given.flag.family, []))[1].append(given)
    return list(rows.values())
