"""Chat templates beside transformers' own `apply_chat_template`: the text, and the mask of what the assistant says."""

import json

import pytest
import tokenizers

from chat_templates import (
    CHATML,
    CHATML_TAGS,
    LLAMA_3,
    MESSAGES,
    MISTRAL,
    RENDERED,
    TOOL_RECORD,
    TOOL_TEXT,
    TOOLS,
)
from jaxckpt.data.chat import make_renderer

transformers = pytest.importorskip("transformers")
SHORT = [{"role": "user", "content": " {{ a }} "}, {"role": "assistant", "content": "<s> b\u2028 "}]


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, so that a mask of tokens says everything about characters."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    bytewise = tokenizers.Tokenizer(model)
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>")


def ours(template, record):
    return make_renderer("chat", template=template, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})(
        record, "a"
    )


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:], SHORT])
@pytest.mark.parametrize("template", [CHATML, CHATML_TAGS, LLAMA_3, MISTRAL, TOOLS])
def test_hugging_face_renders_the_same_text(tokenizer, template, messages):
    theirs = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert ours(template, {"messages": messages}).text == theirs


def test_hugging_face_renders_the_pinned_texts(tokenizer):
    for template, text, _ in RENDERED.values():
        assert tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False) == text
    record = {**TOOL_RECORD, "conversation": TOOL_RECORD["messages"]}
    del record["messages"]
    assert tokenizer.apply_chat_template(**record, chat_template=TOOLS, tokenize=False) == TOOL_TEXT


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:], SHORT])
def test_hugging_face_masks_the_same_answers(tokenizer, messages):
    theirs = tokenizer.apply_chat_template(
        messages,
        chat_template=CHATML_TAGS,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    document = ours(CHATML_TAGS, {"messages": messages})
    mask = [
        int(any(start < end and b > start and a < end for start, end in document.targets))
        for a, b in theirs["offset_mapping"]
    ]
    assert mask == theirs["assistant_masks"] and 0 < sum(mask) < len(mask)


def test_hugging_face_finds_template_and_tokens_in_the_same_files(tokenizer, tmp_path):
    tokenizer.chat_template = LLAMA_3
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["bos_token"] == "<s>"
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs = loaded.apply_chat_template(MESSAGES, tokenize=False)
    document = make_renderer("chat", tokenizer=tmp_path)({"messages": MESSAGES}, "a")
    assert document.text == theirs == RENDERED["llama 3"][1]
