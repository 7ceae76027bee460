"""Records of a conversation, or of a prompt and its response, as documents whose answers alone are learned."""

import datetime
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxckpt.data.sources import Document
from jaxckpt.errors import DataError

if TYPE_CHECKING:
    from jaxckpt.data.template import Template

# Raise it when the same records would give another text, or other targets, than before.
ALGORITHM_VERSION = 1
ASSISTANT = "assistant"
# The names under which data sets keep what a model thinks; the first is the one that templates read.
REASONING = ("reasoning_content", "thinking", "reasoning")
WAY_OUT = "Enclose what the assistant says in {% generation %} and {% endgeneration %} in the template"
Span = tuple[int, int]
Record = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Renderer:
    """Makes the document of a record: `render(record, name)`, where `name` ("file:line") begins every DataError."""

    fingerprint: str  # sha256 in hex of all that decides text and targets of a given record
    document: Callable[[Record, str], Document]

    def __call__(self, record: Record, name: str) -> Document:
        return self.document(record, name)


def make_renderer(
    kind: Literal["chat", "prompt_response"],
    *,
    template: str | Path | None = None,
    tokenizer: str | Path | None = None,
    special_tokens: Mapping[str, str] | None = None,
    messages_key: str = "messages",
    prompt_key: str = "prompt",
    response_key: str = "response",
    date: datetime.date | None = None,
) -> Renderer:
    """A `Renderer` of records {"messages": [{"role", "content"}, ...]} or {"prompt", "response"}.

    `template` is Jinja text or a file of it. A chat without one is rendered with the template beside `tokenizer` (a
    tokenizer.json or its directory), a prompt and response without one are set one after the other. `special_tokens`
    (bos_token, eos_token, ...) win over those beside the tokenizer. All other fields of a record are variables of the
    template. `date` is what a template's `strftime_now` tells.
    """
    if kind not in ("chat", "prompt_response"):
        raise DataError(f"records of kind {kind!r}: expected 'chat' or 'prompt_response'.")
    keys = [messages_key] if kind == "chat" else [prompt_key, response_key]
    if kind == "prompt_response" and prompt_key == response_key:
        raise DataError(f"prompt and response cannot both be field {prompt_key!r} of a record.")
    if kind == "prompt_response" and template is None:
        return Renderer(_digest(kind, keys), lambda record, name: _joined(*_pair(record, keys, name), name))
    templates, tokens = _templates(template, tokenizer, date)
    tokens |= special_tokens or {}

    def document(record: Record, name: str) -> Document:
        fields = {**tokens, **_other_fields(record, keys, name)}
        chosen = (templates.get("tool_use") if fields["tools"] is not None else None) or templates["default"]
        if kind == "chat":
            return _rendered(chosen, _messages(record, messages_key, name), fields, {}, name)
        prompt, response = _pair(record, keys, name)
        messages = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": response}]
        fields |= {"prompt": prompt, "response": response}
        return _rendered(chosen, messages, fields, {"response": ""}, name)

    return Renderer(_digest(kind, keys, tokens, {k: t.fingerprint for k, t in templates.items()}), document)


def _digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps([ALGORITHM_VERSION, *content], sort_keys=True).encode()).hexdigest()


def _templates(
    template: str | Path | None, tokenizer: str | Path | None, date: datetime.date | None
) -> tuple[dict[str, "Template"], dict[str, str]]:
    """The compiled templates by name, with one called "default", and the tokenizer's special tokens."""
    try:
        from jaxckpt.data import template as jinja
    except ImportError as error:
        raise DataError(f"a chat template needs jinja2 ({error}): pip install 'jaxckpt[data]'.") from error
    directory = Path(tokenizer) if tokenizer is not None and str(tokenizer) != "bytes" else None
    if directory is not None and not directory.is_dir():
        directory = directory.parent
    tokens = jinja.special_tokens(directory) if directory else {}
    if template is None:
        sources = jinja.template_sources(directory) if directory else {}
        if "default" not in sources:
            where = f"{directory} has none (chat_template.jinja, or chat_template in tokenizer_config.json)"
            others = f"; it has {', '.join(sources)}" if sources else ""
            raise DataError(
                f"chat records need a chat template, and {where if directory else 'no tokenizer brings one'}{others}. "
                "Give one: a file of Jinja, as the model's own tokenizer has it."
            )
    elif "{{" in str(template) or "{%" in str(template):
        sources = {"default": (str(template), "given as text")}
    elif Path(template).is_file():
        sources = {"default": (jinja.read_text(Path(template)), str(template))}
    else:
        raise DataError(f"chat template '{template}' is neither a file (looked in {Path.cwd()}) nor Jinja text.")
    compiled = {n: jinja.compile_template(source, where, date=date) for n, (source, where) in sources.items()}
    return compiled, tokens


def _joined(prompt: str, response: str, name: str) -> Document:
    return Document(name, prompt + response, ((len(prompt), len(prompt) + len(response)),))


def _pair(record: Record, keys: Sequence[str], name: str) -> tuple[str, str]:
    problems = []
    for key in keys:
        if key not in record:
            problems.append(f"there is no field {key!r}{_fields_found(record)}")
        elif not isinstance(record[key], str):
            problems.append(f"field {key!r} is {_kind(record[key])}, expected a string")
    if not problems and not record[keys[1]].strip():
        problems.append(f"field {keys[1]!r} is empty, so there is nothing to learn; leave the record out")
    if problems:
        raise DataError(f"{name}: {'; '.join(problems)}")
    return record[keys[0]], record[keys[1]]


def _messages(record: Record, key: str, name: str) -> list[dict[str, Any]]:
    """The messages as the template shall see them, or a DataError with everything that is wrong with them."""
    found = record.get(key)
    if not isinstance(found, list) or not found:
        what = f"field {key!r} is {_kind(found)}" if key in record else f"there is no field {key!r}"
        others = "" if key in record else _fields_found(record)
        raise DataError(f"{name}: {what}{others}; expected a list of messages [{{'role': ..., 'content': ...}}, ...]")
    problems = [f"message {i}: {problem}" for i, m in enumerate(found, 1) for problem in _message_problems(m)]
    if not problems and not any(m["role"] == ASSISTANT for m in found):
        roles = ", ".join(dict.fromkeys(m["role"] for m in found))
        problems.append(f"no message has the role '{ASSISTANT}', so there is nothing to learn (roles found: {roles})")
    if problems:
        raise DataError(f"{name}: {'; '.join(problems)}")
    return [_as_seen(message) for message in found]


def _message_problems(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield f"is {_kind(message)}, expected an object with 'role' and 'content'"
        return
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        found = f"'role' is {_kind(role)}, expected a string" if "role" in message else "has no 'role'"
        yield f"{found}{_fields_found(message)}"
    calls = any(message.get(key) for key in ("tool_calls", "function_call", *REASONING))
    if content is None and not calls:
        yield f"{'content is null' if 'content' in message else 'has no content'}{_fields_found(message)}"
    elif content is not None and not isinstance(content, str | list):
        yield f"'content' is {_kind(content)}, expected a string or a list of parts"
    elif role == ASSISTANT and not calls and _is_blank(content):
        yield "the assistant's content is empty, so there is nothing to learn; leave the record out"


def _is_blank(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(p, Mapping) and p.get("type") == "text" and _is_blank(p.get("text")) for p in content)
    return not (content or "").strip()


def _as_seen(message: Record) -> dict[str, Any]:
    """`message` without nulls, which templates would write as "None", and with its reasoning under the usual names."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in REASONING if key in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _other_fields(record: Record, keys: Sequence[str], name: str) -> dict[str, Any]:
    """The template's variables apart from the messages: `tools` and `documents` always, the others where present."""
    fields = {key: value for key, value in record.items() if key not in keys and value is not None}
    more = fields.pop("chat_template_kwargs", {})
    if not isinstance(more, Mapping):
        raise DataError(f"{name}: field 'chat_template_kwargs' is {_kind(more)}, expected an object")
    fields = {"tools": None, "documents": None, **fields, **more}
    for key in ("tools", "documents"):
        value = fields[key]
        if isinstance(value, str):  # a table cannot hold objects of different shapes, so there they are JSON text
            try:
                fields[key] = value = json.loads(value)
            except ValueError as error:
                raise DataError(f"{name}: field {key!r} is a string, but not JSON ({error})") from error
        if value is not None and not (isinstance(value, list) and all(isinstance(v, Mapping) for v in value)):
            raise DataError(f"{name}: field {key!r} is {_kind(value)}, expected a list of objects")
    return fields


def _rendered(
    template: "Template", messages: list[dict[str, Any]], fields: dict[str, Any], unanswered: Record, name: str
) -> Document:
    """The document of `messages`; `unanswered`: what replaces `fields` where the answer has not been given yet."""
    whole = {**fields, "messages": messages, "add_generation_prompt": False}
    text = template.render(whole, name)
    if template.marks_answers:
        targets = template.answers(whole, text, name)
    else:
        targets = list(_answers_by_prefix(template, messages, fields, unanswered, text, name))
    if not any(text[start:end].strip() for start, end in targets):
        raise DataError(
            f"{name}: the chat template {template.where} marks nothing of this record as the assistant's, "
            "so there is nothing to learn. Check its {% generation %} tags, or leave the record out."
        )
    return Document(name, text, tuple(targets))


def _answers_by_prefix(
    template: "Template",
    messages: list[dict[str, Any]],
    fields: dict[str, Any],
    unanswered: Record,
    text: str,
    name: str,
) -> Iterator[Span]:
    """What each answer adds to the conversation before it, with the prompt for an answer: content and end of turn."""
    for i, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        try:
            prompt = {**fields, **unanswered, "messages": messages[:i], "add_generation_prompt": True}
            begun = template.render(prompt, name)
            answered = {**fields, "messages": messages[: i + 1], "add_generation_prompt": False}
            done = template.render(answered, name) if i + 1 < len(messages) else text
        except DataError as error:
            raise DataError(
                f"{error} That was with the first {i} or {i + 1} messages only, which shows where answer {i + 1} "
                f"begins and ends. {WAY_OUT}, and this is not needed."
            ) from error
        for part, longer, what in (
            (begun, done, f"the messages before message {i + 1}, with the prompt for an answer"),
            (done, text, f"the messages up to message {i + 1}"),
        ):
            if not longer.startswith(part):
                raise DataError(
                    f"{name}: where message {i + 1}, an answer, begins and ends cannot be told: the text of {what}, "
                    f"is not how the text with what follows begins ({_parting(part, longer)}). The chat template "
                    f"{template.where} writes a message differently when others follow. {WAY_OUT}."
                )
        if len(done) > len(begun):
            yield len(begun), len(done)


def _parting(a: str, b: str) -> str:
    """Where two texts part, with what each says there."""
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"at character {place}: {a[place : place + 30]!r} and {b[place : place + 30]!r}"


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a bool", str: "a string", list: "a list", dict: "an object"}
    name = names.get(type(value), f"a number ({value})" if isinstance(value, int | float) else type(value).__name__)
    return f"{name}, but empty" if isinstance(value, str | list | dict) and not value else name


def _fields_found(record: Record) -> str:
    return f" (fields found: {', '.join(map(repr, list(record)[:10])) or 'none'})"
