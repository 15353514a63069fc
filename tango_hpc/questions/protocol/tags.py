"""The tags and boxes that both grammars are made of. Every function is linear in the text and accepts any string.

What stands inside an open element is content: it may hold any tag but the element's own closing tag, which it holds
only as part of a whole quoted element. (Where a quoted element is followed by the closing tag of what holds the step,
the step ends with the quotation.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

_TAG = re.compile(r"<(/?)(think|step|answer|step_verification|final_verification)>")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?:\s*\{|\s+(?P<bare>[+-]?\d+(?:\.\d+)?|[A-Za-z])(?![A-Za-z]))")

# The elements that each element may hold; "" is the whole text.
Grammar = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Tag:
    """One tag: its name, with "/" in front where it closes, and the characters [start, end) it takes."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Element:
    """One element: the characters [start, end) of it all and [inner_start, inner_end) between its tags.

    `children`: the elements directly inside, as far as the grammar has any. `strays`: tags directly inside that belong
    to no element. `is_closed` is False where its closing tag is missing; the element then ends where its text does.
    """

    name: str
    start: int
    inner_start: int
    inner_end: int
    end: int
    is_closed: bool = True
    children: tuple[Element, ...] = ()
    strays: tuple[Tag, ...] = ()

    def inside(self, text: str) -> str:
        """Return the text between the tags."""
        return text[self.inner_start : self.inner_end]

    def between(self, text: str) -> str:
        """Return the text inside that belongs to no child and no tag."""
        taken = sorted(
            [(part.start, part.end) for part in self.children] + [(tag.start, tag.end) for tag in self.strays]
        )
        starts = [self.inner_start, *(end for _, end in taken)]
        ends = [*(start for start, _ in taken), self.inner_end]
        return "".join(text[start:end] for start, end in zip(starts, ends, strict=True))


# Says of an element whose text begins at the first character, and of an opening tag of the same name in it (its start
# and end), whether that tag starts the next element: the open one then lacks its closing tag.
StartsAnew = Callable[[int, int, int], bool]


def find_tags(text: str) -> list[Tag]:
    """Return all tags of the protocol in `text`, in order; anything else in angle brackets is text."""
    return [Tag(match[1] + match[2], match.start(), match.end()) for match in _TAG.finditer(text)]


def read_elements(text: str, grammar: Grammar, starts_anew: StartsAnew | None = None) -> Element:
    """Return the whole text as an element named "", with the elements of `grammar` in it.

    An element without children ends at the closing tag that matches its opening tag, quoted elements of its own name
    counted; where there is no such tag, at the closing tag that follows, or before the opening tag at which
    `starts_anew` says so. An element without any closing tag ends where its parent does, or the text.
    """
    return _Reader(text, grammar, starts_anew).read()


class _Reader:
    def __init__(self, text: str, grammar: Grammar, starts_anew: StartsAnew | None) -> None:
        self._text, self._grammar, self._starts_anew = text, grammar, starts_anew
        self._tags = find_tags(text)
        self._matching: dict[int, int] = {}
        self._next_close: dict[int, int] = {}
        for name in {name for children in grammar.values() for name in children}:
            ends = {f"/{parent}" for parent in self._parents(name)}
            self._matching |= _matching_tags(self._tags, name, ends)
            self._next_close |= _next_closing_tags(self._tags, name, ends)

    def read(self) -> Element:
        children, strays, _ = self._content(0, "")
        return Element("", 0, 0, len(self._text), len(self._text), True, children, strays)

    def _content(
        self, i: int, parent: str, siblings: Sequence[str] = ()
    ) -> tuple[tuple[Element, ...], tuple[Tag, ...], int]:
        """Read what `parent` holds, from tag `i` to its closing tag or the first of `siblings`.

        Returns its children, its stray tags and the tag at which it ends.
        """
        children: list[Element] = []
        strays: list[Tag] = []
        while i < len(self._tags) and self._tags[i].name not in (f"/{parent}", *siblings):
            is_mention = not parent and not children and self._is_mention(i)
            if self._tags[i].name in self._grammar[parent] and not is_mention:
                element, i = self._element(i)
                children.append(element)
            else:
                strays.append(self._tags[i])
                i += 1
        return tuple(children), tuple(strays), i

    def _element(self, i: int) -> tuple[Element, int]:
        """Read the element that tag `i` opens; return it and the tag behind it."""
        opening = self._tags[i]
        children: tuple[Element, ...] = ()
        strays: tuple[Tag, ...] = ()
        inner = self._grammar.get(opening.name, ())
        if inner:
            children, strays, last = self._content(i + 1, opening.name)
            if last == len(self._tags):  # never closed: the next element beside it ends it
                siblings = [name for name in self._grammar[""] if name not in inner]
                children, strays, last = self._content(i + 1, opening.name, siblings)
        else:
            last = self._end_of_leaf(i)
        at_tag = last < len(self._tags)
        inner_end = self._tags[last].start if at_tag else len(self._text)
        is_closed = at_tag and self._tags[last].name == f"/{opening.name}"
        end = self._tags[last].end if is_closed else inner_end
        element = Element(opening.name, opening.start, opening.end, inner_end, end, is_closed, children, strays)
        return element, last + is_closed

    def _is_mention(self, i: int) -> bool:
        """Return whether an opening tag between the elements only names an element that comes later.

        Without a matching closing tag, the element would swallow a whole one with children.
        """
        name, closing = self._tags[i].name, self._next_close.get(i)
        if self._grammar.get(name) or self._parents(name) or closing is None or i in self._matching:
            return False
        return any(self._grammar.get(self._tags[j].name) for j in range(i + 1, closing))

    def _end_of_leaf(self, i: int) -> int:
        """Return the tag that ends an element without children: its closing tag, or the tag before which it ends."""
        opening = self._tags[i]
        closing = self._matching.get(i)
        if closing is not None:
            return closing
        closing = self._next_close.get(i)
        limit = len(self._tags) if closing is None else closing
        ends = self._ends_of_parents(opening.name)
        starts_anew = self._starts_anew if ends else None
        for j in range(i + 1, limit):
            tag = self._tags[j]
            if tag.name != opening.name:
                if closing is None and tag.name in ends:
                    return j
            elif closing is None or (starts_anew and starts_anew(opening.end, tag.start, tag.end)):
                return j
        return limit

    def _parents(self, name: str) -> list[str]:
        return [parent for parent, children in self._grammar.items() if parent and name in children]

    def _ends_of_parents(self, name: str) -> set[str]:
        """Return the tags that end, or come after, what an element `name` can stand in; none where that is the text."""
        parents = self._parents(name)
        return {f"/{parent}" for parent in parents} | set(self._grammar[""]) - {*parents, name} if parents else set()


def _is_border(tags: Sequence[Tag], i: int, name: str, ends: Container[str]) -> bool:
    """Return whether tag `i` ends what holds elements `name`: one of them has just been closed."""
    return i > 0 and tags[i].name in ends and tags[i - 1].name == f"/{name}"


def _matching_tags(tags: Sequence[Tag], name: str, ends: Container[str] = ()) -> dict[int, int]:
    """Return by index the closing tag of each opening one that has one, as brackets match; none across a border."""
    open_tags: list[int] = []
    matching = {}
    for i, tag in enumerate(tags):
        if _is_border(tags, i, name, ends):
            open_tags.clear()
        if tag.name == name:
            open_tags.append(i)
        elif tag.name == f"/{name}" and open_tags:
            matching[open_tags.pop()] = i
    return matching


def _next_closing_tags(tags: Sequence[Tag], name: str, ends: Container[str]) -> dict[int, int]:
    """Return by index the closing tag that follows each opening one.

    Of several closing tags in a row this is the last before a border: the others belong to what the element quotes.
    """
    following: int | None = None
    in_run = False
    found: dict[int, int] = {}
    for i in range(len(tags) - 1, -1, -1):
        if tags[i].name == name:
            in_run = False
            if following is not None:
                found[i] = following
        elif tags[i].name == f"/{name}":
            following = following if in_run else i
            in_run = True
        if _is_border(tags, i, name, ends):
            in_run = False
    return found


def without_elements(text: str) -> str:
    """Return `text` without whole elements of any name: what it quotes is not its own."""
    tags = find_tags(text)
    matching: dict[int, int] = {}
    for name in {tag.name for tag in tags}:
        matching |= _matching_tags(tags, name)
    parts, position = [], 0
    for i, tag in enumerate(tags):
        if i in matching and tag.start >= position:
            parts.append(text[position : tag.start])
            position = tags[matching[i]].end
    return "".join([*parts, text[position:]])


def last_box(text: str) -> str | None:
    r"""Return the stripped text in the last `\boxed{…}` or `\fbox{…}`; None where there is no box, or it never closes,
    or it is empty.

    Braces inside may nest; `\{` and `\}` are text. A box without braces holds a number or a letter: `\boxed 2`.
    """
    found = list(_BOX.finditer(text))
    if not found:
        return None
    box = found[-1]
    if box["bare"]:
        return box["bare"]
    start = box.end()
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position].strip() or None
        position += 1
    return None
