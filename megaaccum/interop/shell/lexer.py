"""Shell text into tokens: words with their quotes and expansions kept apart, operators, line ends.

The grammar is that of the POSIX shell, with bash's arrays, [[ ]] and (( )), as far as launch scripts use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class ShellError(Exception):
    """The text cannot be read as a shell script or a list of flags; the message names the line."""


@dataclass(frozen=True, slots=True)
class Text:
    """Characters that stand for themselves."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Param:
    """$name, ${name}, ${name[index]}, ${name:-word} and the like."""

    name: str
    index: str
    """'@', '*', a number, or '' without brackets."""
    operator: str
    """':-', '+' ..., '' for none, '?' for one that is not followed here."""
    operand: Word | None
    quoted: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """$(( expression )), or (( expression )) as a command."""

    expression: str
    quoted: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A piece whose value only execution tells: a command or process substitution."""

    quoted: bool
    raw: str


Piece = Text | Param | Arithmetic | Opaque


@dataclass(slots=True)
class Word:
    """One word of a script, before expansion."""

    line: int
    pieces: list[Piece] = field(default_factory=list)
    array: list[Word] | None = None
    """The elements, for an assignment NAME=( ... )."""

    def literal(self) -> str | None:
        """The text, if the word is nothing but unquoted text: only then can it be a reserved word."""
        if self.array is None and all(isinstance(piece, Text) and not piece.quoted for piece in self.pieces):
            return "".join(piece.text for piece in self.pieces if isinstance(piece, Text))
        return None


@dataclass(frozen=True, slots=True)
class Operator:
    """; & | && || ( ) and so on; a line end is '\\n'."""

    text: str
    line: int


Token = Word | Operator

_OPERATORS = ("<<<", "<<-", "&>>", "&&", "||", ";;", "&>", ">>", ">&", "<&", "<<", ";", "&", "|", "(", ")", "<", ">")
_REDIRECTIONS = frozenset({"<<<", "&>>", "&>", ">>", ">&", "<&", "<", ">"})
_ARRAY_START = re.compile(r"[A-Za-z_]\w*\+?=")
_BRACES = re.compile(r"([A-Za-z_]\w*|[0-9@*#?$!]+)(?:\[([@*]|\d+)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")


class Lexer:
    """Reads one text. With `plain`, it is a list of flags: no operators, and line ends are blanks."""

    def __init__(self, text: str, *, plain: bool = False, first_line: int = 1):
        self.text = text.replace("\r\n", "\n")
        self.plain = plain
        self.first_line = first_line
        self.at = 0
        self.heredocs: list[str] = []

    def tokens(self) -> list[Token]:
        """All tokens. Redirections and here-documents are left out.

        Raises:
            ShellError: a quote, brace or parenthesis is not closed.
        """
        tokens: list[Token] = []
        while self.skip_blanks():
            operator = None if self.plain else self._operator()
            if operator is None:
                tokens.append(self.word())
            elif operator in ("<<", "<<-"):
                self.skip_blanks()
                self.heredocs.append("".join(getattr(piece, "text", "") for piece in self.word().pieces))
            elif operator in _REDIRECTIONS:
                self._drop_descriptor(tokens)
                if self.skip_blanks() and self.peek() != "\n":
                    self.word()
            else:
                tokens.append(Operator(operator, self.line()))
                if operator == "\n":
                    self._skip_heredocs()
        return tokens

    def line(self) -> int:
        """The line of the place reached."""
        return self.first_line + self.text.count("\n", 0, self.at)

    def peek(self) -> str:
        """The character at the place reached, '' at the end."""
        return self.text[self.at : self.at + 1]

    def skip_blanks(self) -> bool:
        """Go to the next token; False at the end of the text."""
        while self.at < len(self.text):
            char = self.peek()
            if char in " \t\r" or (self.plain and char == "\n"):
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return True
        return False

    def _operator(self) -> str | None:
        if self.text.startswith("((", self.at) or self.text.startswith(("<(", ">("), self.at):
            return None
        for operator in ("\n", *_OPERATORS):
            if self.text.startswith(operator, self.at):
                self.at += len(operator)
                return operator
        return None

    def _drop_descriptor(self, tokens: list[Token]) -> None:
        """The 2 of 2>&1 was read as a word of its own."""
        if tokens and isinstance(tokens[-1], Word) and tokens[-1].literal() in ("0", "1", "2"):
            if self.text[: self.at].rstrip("<>&")[-1:].isdigit():
                tokens.pop()

    def _skip_heredocs(self) -> None:
        for delimiter in self.heredocs:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end].strip(), end + 1
                if line == delimiter:
                    break
        self.heredocs.clear()

    def word(self) -> Word:
        """The word at the place reached, which is no blank."""
        word = Word(self.line())
        if not self.plain and self.text.startswith("((", self.at):
            word.pieces.append(self._arithmetic(2, quoted=False))
            return word
        if self.text.startswith(("<(", ">("), self.at):
            word.pieces.append(self._opaque(self.at + 1, quoted=False))
        while self.at < len(self.text) and not self._ends_word():
            if not self.plain and self.peek() == "(" and _ARRAY_START.fullmatch(word.literal() or ""):
                word.array = self._array(word.line)
                break
            self._piece(word)
        return word

    def _ends_word(self) -> bool:
        char = self.peek()
        if char.isspace():
            return True
        if self.plain or char not in "();&|<>":
            return False
        # The parenthesis of an array belongs to the word before it.
        return not (char == "(" and self.text[self.at - 1] == "=")

    def _array(self, line: int) -> list[Word]:
        self.at += 1
        words: list[Word] = []
        while True:
            while self.skip_blanks() and self.peek() == "\n":
                self.at += 1
            if self.at >= len(self.text):
                raise ShellError(f"line {line}: the array's parenthesis is not closed.")
            if self.peek() == ")":
                self.at += 1
                return words
            before = self.at
            words.append(self.word())
            if self.at == before:
                raise ShellError(f"line {self.line()}: unexpected {self.peek()} in an array.")

    def _piece(self, word: Word) -> None:
        char = self.peek()
        if self.text.startswith("\\\n", self.at):
            self.at += 2
        elif char == "\\":
            word.pieces.append(Text(self.text[self.at + 1 : self.at + 2], True))
            self.at += 2
        elif char == "'" or self.text.startswith("$'", self.at):
            start = self.text.index("'", self.at) + 1
            word.pieces.append(Text(self.text[start : self._find("'", start)], True))
        elif char == '"':
            self._double_quoted(word)
        elif char in "$`":
            word.pieces.append(self._expansion(quoted=False))
        else:
            match = re.compile(r"[^\s\\'\"$`();&|<>]+|.").match(self.text, self.at)
            assert match
            self.at = match.end()
            word.pieces.append(Text(match[0], False))

    def _find(self, closing: str, start: int) -> int:
        """The next `closing` from `start`, and go behind it."""
        end = self.text.find(closing, start)
        if end < 0:
            raise ShellError(f"line {self.line()}: {closing} is not closed.")
        self.at = end + len(closing)
        return end

    def _double_quoted(self, word: Word) -> None:
        line = self.line()
        self.at += 1
        word.pieces.append(Text("", True))
        while self.at < len(self.text):
            char = self.peek()
            if char == '"':
                self.at += 1
                return
            if char in "$`":
                word.pieces.append(self._expansion(quoted=True))
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in ("\n", '"', "\\", "$", "`"):
                escaped = self.text[self.at + 1]
                word.pieces.append(Text("" if escaped == "\n" else escaped, True))
                self.at += 2
            else:
                word.pieces.append(Text(char, True))
                self.at += 1
        raise ShellError(f'line {line}: " is not closed.')

    def _expansion(self, *, quoted: bool) -> Piece:
        start = self.at
        if self.peek() == "`":
            end = self._find("`", start + 1)
            inside = self.text[start + 1 : end]
            # `# a comment` inside a long command is a common trick: it runs nothing.
            is_comment = inside.lstrip().startswith("#") and "\n" not in inside
            return Text("", quoted) if is_comment else Opaque(quoted, self.text[start : end + 1])
        if self.text.startswith("$((", start):
            return self._arithmetic(3, quoted=quoted)
        if self.text.startswith("$(", start):
            return self._opaque(start + 1, quoted=quoted)
        if self.text.startswith("${", start):
            return self._braces(quoted=quoted)
        match = _NAME.match(self.text, start + 1)
        if not match:
            self.at += 1
            return Text("$", quoted)
        self.at = match.end()
        return Param(match[0], "", "", None, quoted, self.text[start : self.at])

    def _braces(self, *, quoted: bool) -> Param:
        start = self.at
        end = self._matching(start + 1, "{", "}")
        inside, self.at = self.text[start + 2 : end], end + 1
        raw = self.text[start : self.at]
        match = _BRACES.fullmatch(inside)
        if not match:
            return Param(inside, "", "?", None, quoted, raw)
        operand = None
        if match[3]:
            inner = Lexer(match[4], plain=True, first_line=self.line())
            operand = Word(self.line())
            while inner.at < len(inner.text):
                inner._piece(operand)
        return Param(match[1], match[2] or "", match[3] or "", operand, quoted, raw)

    def _arithmetic(self, opening: int, *, quoted: bool) -> Arithmetic:
        start = self.at
        end = self._matching(start + opening - 2, "(", ")")
        self.at = end + 1
        raw = self.text[start : self.at]
        return Arithmetic(raw[opening:-2], quoted, raw)

    def _opaque(self, parenthesis: int, *, quoted: bool) -> Opaque:
        start = self.at
        self.at = self._matching(parenthesis, "(", ")") + 1
        return Opaque(quoted, self.text[start : self.at])

    def _matching(self, start: int, opening: str, closing: str) -> int:
        """The place of the bracket that closes the one at `start`; quoted brackets do not count."""
        depth, at, quote = 0, start, ""
        while at < len(self.text):
            char = self.text[at]
            if char == "\\" and quote != "'":
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in (opening, closing):
                depth += 1 if char == opening else -1
                if depth == 0:
                    return at
            at += 1
        raise ShellError(f"line {self.line()}: {opening} is not closed.")
