"""A chat template as Hugging Face renders it, and which part of its text it marks as the assistant's."""

import datetime
import hashlib
import json
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxckpt.errors import DataError

Span = tuple[int, int]
_MARKS = "the two characters that enclose an answer"  # no template can name a variable so


class Refused(jinja2.TemplateError):
    """What a template says with `raise_exception`."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: encloses its text in two marks where the rendering is given some.

    Hugging Face counts characters that were output so far instead, and is wrong where the tags stand in a macro or a
    `{% set %}`, whose text comes out later or never.
    """

    tags = {"generation"}  # noqa: RUF012 (an instance variable of the base class)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _enclose(self, context: jinja2.runtime.Context, caller: Any) -> str:
        start, end = context.get(_MARKS) or ("", "")
        return f"{start}{caller()}{end}"


@dataclass(frozen=True, eq=False)
class Template:
    """A compiled template. `where` is what errors call it; `marks_answers`: it has `{% generation %}` tags."""

    where: str
    fingerprint: str  # sha256 in hex of what decides the text
    marks_answers: bool
    compiled: jinja2.Template

    def render(self, fields: Mapping[str, Any], name: str) -> str:
        """The text for `fields`; a DataError that begins with `name` says what the template refuses or fails at."""
        try:
            return self.compiled.render(fields)
        except Refused as error:
            raise DataError(f"{name}: the chat template {self.where} refuses it: {error.message}") from error
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        except Exception as error:  # whatever a template can do wrong with a record
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
            line = f":{lines[-1]}" if lines else ""
            raise DataError(
                f"{name}: the chat template {self.where}{line} fails with {type(error).__name__}: {error}. "
                "Give the record the fields that the template wants, or mend the template."
            ) from error

    def answers(self, fields: Mapping[str, Any], text: str, name: str) -> list[Span]:
        """The character ranges of `text`, which is `render(fields)`, that stand in generation tags."""
        unused = (c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in text)  # a private-use plane
        start, end = next(unused), next(unused)
        marked = self.render({**fields, _MARKS: (start, end)}, name)
        spans = list(_enclosed(marked, start, end))
        if marked.replace(start, "").replace(end, "") != text:
            raise DataError(
                f"{name}: the chat template {self.where} changes what stands in its {{% generation %}} tags afterwards "
                "(with a filter such as trim, or by its length), so their place in the text is not known. "
                "Put the filter inside the tags."
            )
        return spans


def _enclosed(marked: str, start: str, end: str) -> Iterator[Span]:
    """Ranges between the marks, in the text without them. A pair inside a pair counts as a part of it."""
    depth = begin = 0
    for marks, mark in enumerate(re.finditer(f"[{start}{end}]", marked)):
        place = mark.start() - marks
        begin = begin if depth else place
        depth += 1 if mark.group() == start else -1
        if depth == 0 and place > begin:
            yield begin, place


def compile_template(source: str, where: str, *, date: datetime.date | None) -> Template:
    """`source` in the environment of transformers' `apply_chat_template`; a syntax error becomes a DataError.

    `date` is what `strftime_now` tells, at midnight. Without one the call is an error: the same records would give
    another text on another day.
    """

    def raise_exception(message: Any) -> None:
        raise Refused(str(message))

    def strftime_now(form: str) -> str:
        if date is None:
            raise DataError(
                f"the chat template {where} writes today's date (strftime_now), so the same data would give another "
                "text tomorrow. Give the date that it shall write."
            )
        return datetime.datetime.combine(date, datetime.time()).strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        tree = environment.parse(source)
        compiled = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template {where}:{error.lineno} is not valid Jinja: {error.message}") from error
    marks = any(call.identifier == Generation.identifier for call in tree.find_all(nodes.ExtensionAttribute))
    content = json.dumps([source, date and date.isoformat()])
    return Template(where, hashlib.sha256(content.encode()).hexdigest(), marks, compiled)


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False):
    # Jinja's own escapes <, > and & for HTML.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def template_sources(directory: Path) -> dict[str, tuple[str, str]]:
    """{name: (source, where)} of the chat templates beside a tokenizer.json; the usual one is called "default".

    They stand in chat_template.jinja and additional_chat_templates/NAME.jinja, or in tokenizer_config.json.
    """
    found: dict[str, tuple[str, str]] = {}
    config = directory / "tokenizer_config.json"
    named = _json_object(config).get("chat_template")
    if isinstance(named, str):
        found["default"] = named, f"in {config}"
    elif isinstance(named, list):
        found |= {entry["name"]: (entry["template"], f"{entry['name']!r} in {config}") for entry in named}
    files = {"default": directory / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    return found | {name: (read_text(file), str(file)) for name, file in files.items() if file.is_file()}


def special_tokens(directory: Path) -> dict[str, str]:
    """{"bos_token": "<s>", ...} of the tokenizer in `directory`, for the template to write."""
    entries = _json_object(directory / "special_tokens_map.json") | _json_object(directory / "tokenizer_config.json")
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in entries.items()}
    return {key: value for key, value in contents.items() if key.endswith("_token") and isinstance(value, str)}


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}). Write it anew with the tokenizer's save_pretrained.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, not an object. Write it anew with save_pretrained.")
    return value


def read_text(path: Path) -> str:
    """The text of a file, or a DataError with its path."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8 ({error.reason}).") from error
