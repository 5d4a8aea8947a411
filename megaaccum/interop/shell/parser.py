"""Tokens of a shell script into commands, conditions, loops and functions."""

from __future__ import annotations

from dataclasses import dataclass, field

from megaaccum.interop.shell.lexer import Lexer, Operator, ShellError, Text, Token, Word


@dataclass(slots=True)
class Simple:
    """One command: assignments, a name, arguments."""

    words: list[Word]
    line: int


@dataclass(slots=True)
class Chain:
    """Commands joined by && and ||; the operator before the first is ''."""

    links: list[tuple[str, Node]]


@dataclass(slots=True)
class Block:
    """Commands one after another: a script, a branch, a group in braces or parentheses."""

    nodes: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class If:
    """Branches as (condition, body), the last condition None for else."""

    branches: list[tuple[Block | None, Block]]
    line: int


@dataclass(slots=True)
class Case:
    """case subject in pattern | pattern) body ;; ... esac"""

    subject: Word
    arms: list[tuple[list[Word], Block]]
    line: int


@dataclass(slots=True)
class Loop:
    """for, while, until, select: how often the body runs is not known here, unless the condition fails at once."""

    variable: str
    condition: Block | None
    """Of while and until."""
    until: bool
    body: Block
    line: int


@dataclass(slots=True)
class Function:
    """A function's body, which runs where its name is called."""

    name: str
    body: Node


Node = Simple | Chain | Block | If | Case | Loop | Function

_SEPARATORS = frozenset({";", "&", "\n", "|"})
_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


def parse_script(text: str, *, first_line: int = 1) -> Block:
    """The script as a tree.

    Raises:
        ShellError: something is opened and not closed, or closed and not open.
    """
    parser = _Parser(Lexer(text, first_line=first_line).tokens())
    block = parser.block(frozenset())
    if parser.at < len(parser.tokens):
        token = parser.tokens[parser.at]
        text = token.text if isinstance(token, Operator) else str(token.literal())
        raise ShellError(f"line {token.line}: unexpected {text}.")
    return block


class _Parser:
    def __init__(self, tokens: list[Token]):
        self.tokens = tokens
        self.at = 0

    def block(self, ends: frozenset[str]) -> Block:
        """Commands up to one of `ends` (reserved words or operators), which is left in place."""
        block = Block()
        while True:
            while self._operator() in _SEPARATORS:
                self.at += 1
            token = self._token()
            if token is None or self._text() in ends or self._operator() in (")", ";;"):
                return block
            block.nodes.append(self._chain())

    def _token(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _operator(self) -> str | None:
        token = self._token()
        return token.text if isinstance(token, Operator) else None

    def _text(self) -> str | None:
        """The unquoted text of the token, for reserved words and operators."""
        token = self._token()
        return token.literal() if isinstance(token, Word) else self._operator()

    def _expect(self, *texts: str, of: str, line: int) -> str:
        """Go over the end of a construct."""
        text = self._text()
        if text not in texts:
            raise ShellError(f"line {line}: {of} has no {' or '.join(texts)}.")
        self.at += 1
        return text

    def _chain(self) -> Node:
        links = [("", self._command())]
        while (operator := self._operator()) in ("&&", "||"):
            self.at += 1
            while self._operator() == "\n":
                self.at += 1
            links.append((operator, self._command()))
        return links[0][1] if len(links) == 1 else Chain(links)

    def _command(self) -> Node:
        token, text = self._token(), self._text()
        if token is None:
            raise ShellError("the script ends in the middle of a command.")
        match text:
            case "if":
                return self._if(token.line)
            case "for" | "select":
                return self._for(token.line)
            case "while" | "until":
                return self._while(token.line)
            case "case":
                return self._case(token.line)
            case "{" | "(":
                return self._group("}" if text == "{" else ")", token.line)
            case "function":
                return self._function(token.line, named=True)
        if text in _CLOSING:
            raise ShellError(f"line {token.line}: unexpected {text}.")
        following = self.tokens[self.at + 1 : self.at + 3]
        if isinstance(token, Word) and [getattr(token, "text", "") for token in following] == ["(", ")"]:
            return self._function(token.line, named=False)
        return self._simple(token.line)

    def _simple(self, line: int) -> Simple:
        words: list[Word] = []
        double = self._text() == "[["
        while (token := self._token()) is not None:
            if isinstance(token, Word):
                words.append(token)
            elif double and token.text != "\n":
                # Inside [[ ]], operators are part of the condition.
                words.append(_as_word(token))
            else:
                break
            self.at += 1
            if double and words[-1].literal() == "]]":
                break
        if not words:
            raise ShellError(f"line {line}: unexpected {self._text()}.")
        return Simple(words, line)

    def _group(self, end: str, line: int) -> Block:
        self.at += 1
        block = self.block(frozenset({end}))
        self._expect(end, of="a group", line=line)
        return block

    def _if(self, line: int) -> If:
        branches: list[tuple[Block | None, Block]] = []
        found = "if"
        while found in ("if", "elif"):
            self.at += 1 if found == "if" and not branches else 0
            condition = self.block(frozenset({"then"}))
            self._expect("then", of="if", line=line)
            branches.append((condition, self.block(frozenset({"elif", "else", "fi"}))))
            found = self._expect("elif", "else", "fi", of="if", line=line)
        if found == "else":
            branches.append((None, self.block(frozenset({"fi"}))))
            self._expect("fi", of="if", line=line)
        return If(branches, line)

    def _for(self, line: int) -> Loop:
        self.at += 1
        token = self._token()
        name = token.literal() if isinstance(token, Word) else None
        while self._token() is not None and self._text() != "do":
            self.at += 1
        return Loop(name or "", None, False, self._do(line), line)

    def _while(self, line: int) -> Loop:
        until = self._text() == "until"
        self.at += 1
        condition = self.block(frozenset({"do"}))
        return Loop("", condition, until, self._do(line), line)

    def _do(self, line: int) -> Block:
        self._expect("do", of="a loop", line=line)
        body = self.block(frozenset({"done"}))
        self._expect("done", of="a loop", line=line)
        return body

    def _case(self, line: int) -> Case:
        self.at += 1
        subject = self._token()
        if not isinstance(subject, Word):
            raise ShellError(f"line {line}: case has no word.")
        self.at += 1
        self._skip_lines()
        self._expect("in", of="case", line=line)
        arms: list[tuple[list[Word], Block]] = []
        self._skip_lines()
        while self._text() != "esac":
            arms.append((self._patterns(line), self.block(frozenset({"esac"}))))
            if self._operator() == ";;":
                self.at += 1
            self._skip_lines()
        self.at += 1
        return Case(subject, arms, line)

    def _patterns(self, line: int) -> list[Word]:
        patterns: list[Word] = []
        while (token := self._token()) is not None:
            self.at += 1
            if isinstance(token, Word):
                patterns.append(token)
            elif token.text == ")":
                return patterns
        raise ShellError(f"line {line}: case has no esac.")

    def _skip_lines(self) -> None:
        while self._operator() == "\n":
            self.at += 1

    def _function(self, line: int, *, named: bool) -> Function:
        self.at += 1 if named else 0
        token = self._token()
        name = token.literal() if isinstance(token, Word) else None
        self.at += 1
        if self._operator() == "(":
            self.at += 1
            self._expect(")", of="a function", line=line)
        self._skip_lines()
        if not name or self._token() is None:
            raise ShellError(f"line {line}: a function has no name or no body.")
        return Function(name, self._command())


def _as_word(token: Operator) -> Word:
    return Word(token.line, [Text(token.text, True)])
