"""Masks for text that looks like a secret, in code and on command lines.

Where a look cannot tell, more is masked rather than less. No number of tokens is a secret, nor what only names one: a
type, a variable, a call. Repetitions have bounds: a diff may be one line of half a million characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_PASSWORD = "(?:secret|password|passwd|passphrase)"
_KEY = "(?:api|access|private)[_-]?key"
_ANY = f"(?:token|{_PASSWORD}|{_KEY})"
_IS_COUNT = r"""\w{0,40}["']?\s{0,9}[=:]=?\s{0,9}[\d_.]+(?![\w+/.-])"""
_NAME = rf"(?:token(?!i[sz]|{_IS_COUNT})|{_PASSWORD}|{_KEY})"  # no tokenizer, and no number of tokens
_NO_VALUE = (
    r"(?!(?:str|int|float|bool|bytes|object|any|none|null|true|false|optional|secretstr)(?=[ \t]*(?:$|[,|=)#\[]))"
    rf"|[a-z_.]{{0,40}}{_ANY}[a-z_.]{{0,40}}(?![\w.-])|[a-z_][\w.]{{0,80}}[(\[]"
    r"|(?:self|cls|args|config|options|settings|os)\.)"
)
_YAML_KEY = r"^[+\- ]?[ \t]*(?:-[ \t]+)?[\w.-]{0,80}?"
_YAML_START = r"""[^\s"'#$<>{\[(&*|!]"""

# Of each, the first group stays.
_MASKS = (
    # The body of a private key; also one that is marked as a diff, in a literal, or cut off.
    re.compile(
        r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----)"
        r"(?:(?:(?!-----BEGIN)[\s\S]){0,20000}?(?=-----END )|(?:\W{0,12}[A-Za-z0-9+/=]{16,})+)"
    ),
    # Who asks, in an address: no port, and not the user of git over SSH.
    re.compile(r"""(://)(?!git@)(?:[^\s/?#"'@:]{0,200}:(?!\d+(?:[/?#\s"']|$))[^\s"']{1,200}|[^\s/?#"']{1,200})(?=@)"""),
    re.compile(
        r"""(?i)(authorization["']?\s{0,9}[:=]\s{0,9}[a-z]{0,2}["']|authorization:[ \t]{0,9})(?!["'])[^"'\n]+"""
    ),
    re.compile(r"(?i)(\bbearer\s{1,9})(?=[+/=.~\w-]{0,200}\d)[+/=.~\w-]{8,}"),
    # A literal that is given to such a name, or anything long with a digit.
    re.compile(
        rf"""(?i)({_NAME}\w{{0,40}}["']?\]?\s{{0,9}}(?::[^=\n"']{{1,60}}=|[=:]=?)\s{{0,9}})"""
        r"""(?:[rbfu]{0,2}(?:"[^"\n]+"|'[^'\n]+')|[\w+/.-]*\d[\w+/.-]{7,})"""
    ),
    re.compile(
        rf"""(?i)((?:get|put|set)(?:env|default)?\(["']\w{{0,40}}?{_NAME}\w{{0,40}}["'],\s{{0,9}})["'][^"'\n]+["']"""
    ),
    # For a shell, in the query of an address, in a header, in YAML, in what is no Python.
    re.compile(
        r"((?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(?:API|ACCESS|PRIVATE)_?KEY)=)"
        r"""(?!\d+\b)[^\s"'$<>{(\[`][^\s"'`]*"""
    ),
    re.compile(rf"""(?i)([?&][\w.-]{{0,40}}?{_NAME}=)[^\s"'&#]+"""),
    re.compile(rf"""(?i)(["'][\w-]{{0,40}}?{_NAME}:)[^"'\n]+(?=["'])"""),
    re.compile(rf"(?im)({_YAML_KEY}{_NAME}:[ \t]+){_NO_VALUE}{_YAML_START}\S*(?=[ \t]*(?:[ \t]#.*)?$)"),
    re.compile(rf"(?im)({_YAML_KEY}{_PASSWORD}:[ \t]+){_NO_VALUE}{_YAML_START}.*"),
    re.compile(rf"""(?im)({_PASSWORD}[ \t]{{0,9}}=[ \t]{{0,9}}){_NO_VALUE}[^\s"'$<>{{(\[,;)&=][^\s"'$<>{{(\[,;)&]*"""),
    # Keys that their issuers mark by their beginning.
    re.compile(r"(\b)(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{12,}"),
)

_ARGUMENT = re.compile(rf"(?is)({_ANY})([=:]).+")
_BEFORE_SECRET = re.compile(rf"(?i)--?[\w-]*{_ANY}|[\w-]*(?:{_ANY}|authorization):|bearer")  # in a word of its own
_HEADER = re.compile(r"(?i)[\w-]*authorization:")  # whose value is the next two words


def mask_secrets(code: str) -> str:
    """Return `code` without what looks like a secret."""
    for mask in _MASKS:
        code = mask.sub(r"\1***", code)
    return code


def masked_command(words: Sequence[str]) -> list[str]:
    """Return a command line without secrets: neither `--token=abc` nor `--token abc`, nor one in a header or an
    address.
    """
    return [
        "***"
        if (i and _BEFORE_SECRET.fullmatch(words[i - 1])) or (i > 1 and _HEADER.fullmatch(words[i - 2]))
        else mask_secrets(_ARGUMENT.sub(r"\1\2***", word))
        for i, word in enumerate(words)
    ]
