"""Conversations, and prompts with their responses: the text is that of Hugging Face, and only answers are learned."""

import datetime
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import (
    CHATML,
    CHATML_TAGS,
    LLAMA_3,
    MESSAGES,
    MISTRAL,
    RENDERED,
    TOOL_LEARNED,
    TOOL_RECORD,
    TOOL_TEXT,
    TOOLS,
)
from jaxckpt.data.chat import make_renderer
from jaxckpt.data.prepare import Settings, prepare
from jaxckpt.data.sources import Wanted
from jaxckpt.data.store import TokenStore
from jaxckpt.errors import DataError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def learned(document):
    return [document.text[start:end] for start, end in document.targets]


def chat(template, **options):
    return make_renderer("chat", template=template, special_tokens=TOKENS, **options)


def refusal(render, record):
    with pytest.raises(DataError) as caught:
        render(record, "data.jsonl:7")
    assert str(caught.value).startswith("data.jsonl:7: ")
    return str(caught.value)


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_has_the_text_of_hugging_face_and_its_answers_are_learned(name):
    template, text, answers = RENDERED[name]
    document = chat(template)({"messages": MESSAGES}, "a.jsonl:1")
    assert (document.name, document.text, learned(document)) == ("a.jsonl:1", text, answers)


def test_tools_documents_and_thinking_reach_the_template():
    document = chat(TOOLS)(TOOL_RECORD, "a.jsonl:1")
    assert document.text == TOOL_TEXT and learned(document) == TOOL_LEARNED


def test_tools_may_be_json_text_and_other_fields_are_variables():
    as_text = {**TOOL_RECORD, "tools": json.dumps(TOOL_RECORD["tools"])}
    assert chat(TOOLS)(as_text, "a:1").text == TOOL_TEXT
    template = (
        "{{ lang }}{{ mood }}{{ 'null' if id is defined or chat_template_kwargs is defined }}"
        "{% for m in messages %}{{ '|' + m.content }}{% endfor %}"
    )
    record = {"messages": MESSAGES[1:3], "lang": "de", "chat_template_kwargs": {"mood": "!"}, "id": None}
    assert chat(template)(record, "a:1").text == "de!|Two and two? |Four."


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.text(), st.text().filter(str.strip)), min_size=1, max_size=4), st.none() | st.text(max_size=9)
)
def test_of_any_chatml_conversation_the_answers_and_their_ends_are_learned(turns, system):
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    render, tagged = CHATML_RENDERERS
    assert learned(render({"messages": messages}, "a:1")) == [f"{answer}<|im_end|>\n" for _, answer in turns]
    assert learned(tagged({"messages": messages}, "a:1")) == [f"{answer}<|im_end|>" for _, answer in turns]
    assert render({"messages": messages}, "a:1").text == tagged({"messages": messages}, "a:1").text


CHATML_RENDERERS = chat(CHATML), chat(CHATML_TAGS)


def test_tags_in_a_macro_and_in_a_set_mark_where_the_text_comes_out():
    template = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% set unused = say(messages[-1]) %}{% set first = say(messages[1]) %}"
        "{% for m in messages %}[{{ m.role }}] {{ first if loop.index0 == 1 else say(m) if m.role == 'assistant' }}\n"
        "{% endfor %}"
    )
    messages = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("assistant", "cd")]]
    document = chat(template)({"messages": messages}, "a:1")
    assert document.text == "[user] \n[assistant] b\n[assistant] cd\n" and learned(document) == ["b", "cd"]


def test_a_pair_of_tags_inside_a_pair_is_a_part_of_it():
    inner = "{% generation %}b{% endgeneration %}"
    template = "x{% generation %}a" + inner + "{{ messages[0].content }}{% endgeneration %}y"
    document = chat(template)({"messages": [{"role": "assistant", "content": "\U000f0000"}]}, "a:1")
    assert document.text == "xab\U000f0000y" and document.targets == ((1, 4),)


def test_what_a_filter_does_to_the_text_in_tags_afterwards_is_refused():
    template = (
        "{% macro say() %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endmacro %}{{ say()|trim }}"
    )
    record = {"messages": [{"role": "assistant", "content": " a "}]}
    assert "filter inside the tags" in refusal(chat(template), record)


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        # drops the thinking of earlier answers
        (TOOLS, [*TOOL_RECORD["messages"], *MESSAGES[1:3]], "message 2, an answer, begins and ends cannot be told"),
        # ends the whole text in another way
        (CHATML + "{{ eos_token }}", MESSAGES, r"writes a message differently when others follow"),
        # prompts for an answer with what the answer does not begin with
        (CHATML.replace("assistant\n'", "assistant\n<think>'"), MESSAGES[:3], "with the prompt for an answer"),
        # cannot be rendered without a user
        (MISTRAL, [{"role": "assistant", "content": "Hello."}], "refuses it: After the optional system message"),
        (LLAMA_3.replace("messages %}", "messages[:1] + messages[1:] %}{{ messages[0].role and '' }}", 1)
         + "{{ raise_exception('alone') if messages | length == 1 }}", MESSAGES[1:3], "with the first 1 or 2 messages"),
    ],
)  # fmt: skip
def test_a_template_whose_answers_have_no_certain_place_is_refused_with_the_way_out(template, messages, says):
    message = refusal(chat(template), {"messages": messages})
    assert says in message
    assert "{% generation %}" in message or "refuses it" in message


def test_the_place_where_two_texts_part_is_shown():
    template = CHATML + "{{ '[end]' if not add_generation_prompt }}"
    message = refusal(chat(template), {"messages": MESSAGES})
    place = RENDERED["chatml"][1].index("<|im_start|>user\nGrößer")
    assert f"at character {place}: '[end]' and '<|im_start|>user\\nGrößer <b>&</'" in message


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"conversations": [], "id": 1}, "there is no field 'messages' (fields found: 'conversations', 'id')"),
        ({"messages": "hi"}, "field 'messages' is a string; expected a list of messages"),
        ({"messages": []}, "field 'messages' is a list, but empty"),
        ({"messages": None}, "field 'messages' is null"),
        ({"messages": ["hi"]}, "message 1: is a string, expected an object"),
        ({"messages": [{"from": "gpt", "value": "a"}]}, "message 1: has no 'role' (fields found: 'from', 'value')"),
        ({"messages": [{"role": 3, "content": "a"}]}, "message 1: 'role' is a number (3)"),
        ({"messages": [{"role": "user"}, *MESSAGES]}, "message 1: has no content"),
        ({"messages": [{"role": "user", "content": {}}, *MESSAGES]}, "message 1: 'content' is an object, but empty"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": " \n"}]}, "message 6: the assistant's content is empty"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": ""}]}]}, "content is empty"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1: content is null"),
        ({"messages": MESSAGES[:2]}, "no message has the role 'assistant', so there is nothing to learn (roles found: system, user)"),
        ({"messages": MESSAGES, "tools": "{"}, "field 'tools' is a string, but not JSON"),
        ({"messages": MESSAGES, "tools": ["w"]}, "field 'tools' is a list, expected a list of objects"),
        ({"messages": MESSAGES, "chat_template_kwargs": 1}, "field 'chat_template_kwargs' is a number (1)"),
    ],
)  # fmt: skip
def test_a_bad_record_is_named_with_what_was_found_and_expected(record, says):
    assert says in refusal(chat(CHATML), record)


def test_all_that_is_wrong_with_a_record_is_said_at_once():
    message = refusal(chat(CHATML), {"messages": [{"content": 1}, {"role": "assistant", "content": ""}]})
    assert "message 1: has no 'role'" in message and "message 1: 'content' is a number" in message
    assert "message 2: the assistant's content is empty" in message


def test_what_a_template_refuses_or_fails_at_is_told_with_its_line():
    assert "given as text refuses it: After the optional" in refusal(
        chat(MISTRAL), {"messages": MESSAGES[:1] + MESSAGES[2:]}
    )
    broken = "{{ bos_token }}\n\n{{ messages[0].nothing.at_all }}"
    assert "given as text:3 fails with UndefinedError" in refusal(chat(broken), {"messages": MESSAGES})
    unsafe = "{{ messages.append(1) }}"
    assert "fails with SecurityError" in refusal(chat(unsafe), {"messages": MESSAGES})
    silent = "{{ messages[-1].content }}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert "marks nothing of this record" in refusal(chat(silent), {"messages": MESSAGES})


def test_a_template_that_is_not_jinja_is_refused_with_its_line(tmp_path):
    path = tmp_path / "broken.jinja"
    path.write_text("{{ bos_token }}\n{% for m in messages %}\n{{ m.content }")
    with pytest.raises(DataError, match=r"broken.jinja:3 is not valid Jinja: unexpected '}'"):
        chat(path)
    with pytest.raises(DataError, match="'nowhere.jinja' is neither a file .* nor Jinja text"):
        chat("nowhere.jinja")
    path.write_bytes(b"{{ \xff }}")
    with pytest.raises(DataError, match="broken.jinja: byte 3 is not UTF-8"):
        chat(path)


def test_a_template_that_writes_the_date_needs_to_be_given_one():
    template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert "Give the date" in refusal(chat(template), {"messages": MESSAGES})
    document = chat(template, date=datetime.date(2024, 7, 26))({"messages": MESSAGES}, "a:1")
    assert document.text.startswith("26 Jul 2024<|im_start|>")


def save_tokenizer(directory, **config):
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory / "tokenizer.json"


def test_the_template_and_special_tokens_beside_a_tokenizer_are_used(tmp_path):
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "add_bos_token": True}
    tokenizer = save_tokenizer(tmp_path, chat_template=MISTRAL, **tokens)
    for place in (tokenizer, tmp_path):
        document = make_renderer("chat", tokenizer=place)({"messages": MESSAGES}, "a:1")
        assert document.text == RENDERED["mistral"][1]
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert make_renderer("chat", tokenizer=tmp_path)({"messages": MESSAGES}, "a:1").text == RENDERED["chatml"][1]
    given = make_renderer("chat", tokenizer=tmp_path, template=MISTRAL, special_tokens={"bos_token": "<BOS>"})
    assert given({"messages": MESSAGES}, "a:1").text == "<BOS>" + RENDERED["mistral"][1].removeprefix("<s>")


def test_a_record_with_tools_is_rendered_by_the_template_for_tools(tmp_path):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]
    render = make_renderer("chat", tokenizer=save_tokenizer(tmp_path, chat_template=named))
    assert render(TOOL_RECORD, "a:1").text == TOOL_TEXT
    assert render({"messages": MESSAGES}, "a:1").text == RENDERED["chatml"][1]


def test_a_chat_without_a_template_says_how_to_give_one(tmp_path):
    with pytest.raises(DataError, match="no tokenizer brings one. Give one: a file of Jinja"):
        make_renderer("chat", tokenizer="bytes")
    with pytest.raises(DataError, match=r"has none \(chat_template.jinja, or chat_template in tokenizer_config.json\)"):
        make_renderer("chat", tokenizer=save_tokenizer(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer_config.json is not JSON"):
        make_renderer("chat", tokenizer=tmp_path)


def test_a_prompt_and_its_response_follow_one_another_and_the_response_is_learned():
    render = make_renderer("prompt_response", prompt_key="q", response_key="a")
    document = render({"q": "2 + 2 = ", "a": "4"}, "a:1")
    assert document.text == "2 + 2 = 4" and learned(document) == ["4"]
    assert learned(render({"q": "", "a": "4"}, "a:1")) == ["4"]


def test_a_prompt_and_its_response_may_have_a_template():
    record = {"prompt": "2 + 2", "response": "4", "unit": "m"}
    as_chat = make_renderer("prompt_response", template=CHATML)(record, "a:1")
    assert as_chat.text == "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert learned(as_chat) == ["4<|im_end|>\n"]
    own = make_renderer("prompt_response", template="Q ({{ unit }}): {{ prompt }}\nA: {{ response }}")(record, "a:1")
    assert own.text == "Q (m): 2 + 2\nA: 4" and learned(own) == ["4"]
    ended = "{{ prompt }}\nA: {% generation %}{{ response }}{% endgeneration %}\n--"
    assert learned(make_renderer("prompt_response", template=ended)(record, "a:1")) == ["4"]
    assert "{% generation %}" in refusal(make_renderer("prompt_response", template="{{ response }}--"), record)


def test_a_bad_prompt_or_response_is_named():
    render = make_renderer("prompt_response")
    assert "there is no field 'prompt' (fields found: 'text'); there is no field 'response'" in refusal(
        render, {"text": ""}
    )
    assert "field 'prompt' is a list, expected a string" in refusal(render, {"prompt": [1], "response": "a"})
    assert "field 'response' is empty" in refusal(render, {"prompt": "a", "response": " \n"})
    with pytest.raises(DataError, match="expected 'chat' or 'prompt_response'"):
        make_renderer("dialogue")  # type: ignore[arg-type]


def test_the_fingerprint_follows_what_decides_the_text():
    day = datetime.date(2024, 7, 26)
    renderers = [
        chat(CHATML),
        chat(CHATML_TAGS),
        chat(CHATML, date=day),
        chat(CHATML, messages_key="turns"),
        make_renderer("chat", template=CHATML),
        make_renderer("prompt_response"),
        make_renderer("prompt_response", template=CHATML),
        make_renderer("prompt_response", prompt_key="q"),
    ]
    assert len({r.fingerprint for r in renderers}) == len(renderers)
    assert chat(CHATML).fingerprint == chat(CHATML).fingerprint


def prepared(tmp_path, records, render):
    """The token store of `records`."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = Settings(wanted=Wanted(render=render), render=render.fingerprint)
    prepare([tmp_path / "data.jsonl"], tmp_path / "store", settings)
    return TokenStore(tmp_path / "store")


def test_a_store_of_conversations_learns_the_answers_alone(tmp_path):
    store = prepared(tmp_path, [{"messages": MESSAGES}, {"messages": MESSAGES[1:3]}], chat(CHATML_TAGS))
    assert store.loss_mask is not None
    text, answers = RENDERED["chatml with tags"][1:]
    of_first = slice(0, len(text.encode()) + 1)
    assert bytes(store.tokens[of_first][:-1].astype("uint8")).decode() == text and store.tokens[of_first][-1] == 256
    assert bytes(store.tokens[store.loss_mask == 1].astype("uint8")).decode() == "".join(answers) + answers[0]


def test_bad_conversations_are_named_with_file_and_line_and_no_store_is_made(tmp_path):
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, [{"messages": MESSAGES}, {"messages": []}, {"text": "a"}], chat(CHATML))
    assert f"{tmp_path}/data.jsonl:2: field 'messages' is a list, but empty" in str(caught.value)
    assert "data.jsonl:3: there is no field 'messages'" in str(caught.value)
    assert not (tmp_path / "store" / "store.json").exists()
