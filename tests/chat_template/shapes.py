"""Chat templates in the forms that models come with, written for these tests. Holds no tests."""

CONCATENATING = """{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}"""
"""Template that shows every role and the content as text, and no calls."""

LOOKING_AT_ROLES = """
{%- if messages[0].role == 'system' %}[system]{{ messages[0].content }}
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}[{{ m.role }}]{{ m.content }}
{% elif m.role == 'assistant' %}[assistant]
{%- if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}<call>{{ call.function.name }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}</call>{% endfor %}
{% elif m.role == 'tool' %}[tool]{{ m.content }}
{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}
{%- endif %}"""
"""Template that leaves out roles it does not know, and takes arguments as objects and as text."""

HEADERS = """
{%- set m0 = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}[system]Today. {{ m0 }}
{% for m in rest %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}[assistant]
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{% elif m.role == 'tool' %}[ipython]{{ m.content | tojson }}
{% else %}[{{ m.role }}]{{ m.content | trim }}
{% endif %}{% endfor %}"""
"""Template that shows every role, joins a text to the first system message, takes arguments of calls as objects, and
raises for several calls in one message."""

ALTERNATING = """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- set ns = namespace(turn=0) %}
{%- for m in loop_messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}
{%- if m.role == 'user' %}[user]{{ system + '\n\n' if loop.last and system is defined }}{{ m.content }}
{% elif m.tool_calls is defined and m.tool_calls is not none %}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{%- set arguments = call.function.arguments | tojson %}[calls]
{"name": "{{ call.function.name }}", "arguments": {{ arguments }}}
{% endfor %}
{%- elif m.role == 'assistant' %}{{ m.content | trim + eos_token }}
{% elif m.role in ['tool', 'tool_results'] %}[results]{{ m.content }}
{% else %}{{ raise_exception('roles are user, assistant and tool') }}{% endif %}
{%- endfor %}"""
"""Template that accepts a system message only as the first message. It raises for unknown roles, if user and assistant
do not alternate, and for ids of calls that do not have 9 characters."""

WITHOUT_SYSTEM = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}</turn>
{% endfor %}"""
"""Template that raises for a first system message, and shows all other roles."""

FOLDING = """
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if first else messages) %}
{%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('roles are user and assistant') }}{% endif %}
<turn>{{ m.role }}
{{ first if loop.first }}{{ m.content | trim }}</turn>{% endfor %}"""
"""Template that shows a first system message at the beginning of the next user message."""

NULL_CONTENT = """
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}
{%- endfor %}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}[user]{{ m['content'] }}
{%- elif m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}
{{- '[call]' + call['function']['name'] + '\n' + call['function']['arguments'] + '[end]' }}
{%- endfor %}
{%- elif m['role'] == 'assistant' %}[assistant]{{ m['content'] }}
{%- elif m['role'] == 'tool' %}[output]{{ m['content'] }}
{%- endif %}{% endfor %}"""
"""Template that shows calls if the content is null, takes arguments as text, and keeps the last of several system
messages."""

DEVELOPER = """
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}
[system]Reasoning: {{ reasoning_effort }}
{%- if messages[0].role in ['developer', 'system'] %}
[developer]# Instructions
{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
[to={{ m.tool_calls[0].function.name }}]{{ m.thinking if m.thinking }}{{ m.tool_calls[0].function.arguments | tojson }}
{%- elif m.role == 'assistant' %}
[final]{{ m.content }}
{%- elif m.role == 'tool' %}
[tool]{{ m.content | tojson }}
{%- elif m.role == 'user' %}
[user]{{ m.content }}
{%- endif %}{% endfor %}"""
"""Template that shows a developer or system message if it is the first message, and leaves out later ones."""

SHOUTING = """
{%- if messages[0].role == 'system' %}[SYSTEM]{{ messages[0].content | upper }}
{% endif %}
{%- for m in messages %}{% if m.role != 'system' %}[{{ m.role | upper }}]{{ m.content | upper }}
{% endif %}{% endfor %}"""
"""Template that shows all texts in capitals, and leaves out system messages after the first message."""

SHOUTING_ROLES = """{% for m in messages %}{{ '[' + m.role | upper + ']' + m.content | upper + '\n' }}{% endfor %}"""
"""Template that shows all roles and texts in capitals."""

LAST_MESSAGE = "{{ messages[-1].content }}"
"""Template that shows nothing but the last message."""

SHAPES = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, str)}
