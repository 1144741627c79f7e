"""The chat templates that ship: for tokenizers that have none, and for models that learn to call tools.

They are expressions, not template text: what stands between Jinja's blocks would lose its line ends. A call is written as
Hermes and Qwen write it, so that the servers that read their calls read these too.
"""

from collections.abc import Mapping

CALLS = ("{% for call in message['tool_calls'] %}{{ '\n' if not loop.first or message['content'] else '' }}"
         "{{ '<tool_call>\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) "
         "+ '\n</tool_call>' }}"
         "{% endfor %}")
TOOLS = ("{{ 'You can call these tools:\n<tools>\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
         "{{ '</tools>\nWrite a call as:\n<tool_call>\n{\"name\": NAME, \"arguments\": OBJECT}\n</tool_call>' }}")
SHIPPED: Mapping[str, str] = {
    "plain": "{% if tools %}{{ '### Tools:\n' }}" + TOOLS + "{{ '\n\n' }}{% endif %}"
             "{% for message in messages %}{% if message['tool_calls'] %}{{ '### Assistant:\n' + (message['content'] or '') }}"
             + CALLS + "{{ eos_token + '\n\n' }}{% else %}"
             "{{ '### ' + (message['role'] | capitalize) + ':\n' + message['content'] }}"
             "{{ (eos_token if message['role'] == 'assistant' else '') + '\n\n' }}"
             "{% endif %}{% endfor %}{{ '### Assistant:\n' if add_generation_prompt else '' }}",
    "chatml": "{% if tools %}{{ '<|im_start|>system\n' }}" + TOOLS + "{{ '<|im_end|>\n' }}{% endif %}"
              "{% for message in messages %}"
              "{% if message['tool_calls'] %}{{ '<|im_start|>assistant\n' + (message['content'] or '') }}"
              + CALLS + "{{ '<|im_end|>\n' }}{% else %}"
              "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
              "{% endif %}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}",
    "raw": "{% for message in messages %}"
           "{{ message['content'] + (eos_token if message['role'] == 'assistant' else '') }}{% endfor %}",
}
