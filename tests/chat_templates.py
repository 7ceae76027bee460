"""Chat templates as they are found beside tokenizers, and what they make of a conversation."""

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Two and two? "},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Größer <b>&</b> 😀"},
    {"role": "assistant", "content": " 5\n\nreally "},
]

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The same with tags, over several lines: what trim_blocks and lstrip_blocks are for.
CHATML_TAGS = """\
{% for message in messages %}
    {% if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial system message!") }}
    {%- endif %}
{%- endfor %}
"""

# Tools and documents as JSON, a loop that is left, thinking that is dropped from earlier answers.
TOOLS = """\
{%- if tools %}{{ 'Tools: ' + (tools | tojson) + '\\n' }}{% endif %}
{%- for document in documents or [] %}{{ '[' + document.title + '] ' + document.text + '\\n' }}{% endfor %}
{%- for key, value in {'a': 1}.items() %}{% if value == 1 %}{% continue %}{% endif %}{{ key }}{% endfor %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {{- message.role + ': ' }}
    {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- message.content if message.content is defined }}
    {%- for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson(indent=1)) }}{% endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
"""

# {name: (template, text, what is learned)}; the texts are those of transformers 5.24 (tests/test_chat_hf.py).
RENDERED = {
    "chatml": (
        CHATML,
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nTwo and two? <|im_end|>\n"
        "<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nGrößer <b>&</b> 😀<|im_end|>\n"
        "<|im_start|>assistant\n 5\n\nreally <|im_end|>\n",
        ["Four.<|im_end|>\n", " 5\n\nreally <|im_end|>\n"],
    ),
    "chatml with tags": (
        CHATML_TAGS,
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nTwo and two? <|im_end|>\n"
        "<|im_start|>assistant\nFour.<|im_end|>\n<|im_start|>user\nGrößer <b>&</b> 😀<|im_end|>\n"
        "<|im_start|>assistant\n 5\n\nreally <|im_end|>\n",
        ["Four.<|im_end|>", " 5\n\nreally <|im_end|>"],
    ),
    "llama 3": (
        LLAMA_3,
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nTwo and two?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nFour.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGrößer <b>&</b> 😀<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n5\n\nreally<|eot_id|>",
        ["Four.<|eot_id|>", "5\n\nreally<|eot_id|>"],
    ),
    "mistral": (
        MISTRAL,
        "<s>[INST] Be short.\n\nTwo and two? [/INST] Four.</s>[INST] Größer <b>&</b> 😀[/INST]  5\n\nreally </s>",
        [" Four.</s>", "  5\n\nreally </s>"],
    ),
}

TOOL_RECORD = {
    "messages": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "thinking": "ask",
            "tool_calls": [{"function": {"name": "w", "arguments": {"at": "Köln"}}}],
        },
        {"role": "tool", "content": "<rain>"},
        {"role": "assistant", "content": "It rains."},
    ],
    "tools": [{"type": "function", "function": {"name": "w", "description": "a > b"}}],
    "documents": [{"title": "Atlas", "text": "Köln is wet."}],
}
TOOL_TEXT = (
    'Tools: [{"type": "function", "function": {"name": "w", "description": "a > b"}}]\n[Atlas] Köln is wet.\n'
    'user: Weather?\nassistant: <think>ask</think><call>{\n "name": "w",\n "arguments": {\n  "at": "Köln"\n }\n}\n'
    "tool: <rain>\nassistant: It rains.\n"
)
TOOL_LEARNED = [
    '<think>ask</think><call>{\n "name": "w",\n "arguments": {\n  "at": "Köln"\n }\n}\n',
    "It rains.\n",
]
