"""An agent that knows only an address: it asks, checks what it got, and asks again until there
is an answer.

shoal train model=Qwen/Qwen2.5-1.5B-Instruct task=gsm8k agent='python agent.py'
"""

import json
import re
import sys

import openai

ASK = "Solve this step by step. End with one line: #### and the answer as a number."


def number(text: str) -> str:
    """The number after ####, without commas; empty if there is none."""
    match = re.search(r"####\s*(-?[\d,]*\d)", text)
    return match[1].replace(",", "") if match else ""


if __name__ == "__main__":
    row = json.load(sys.stdin)
    client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are this rollout's
    messages = [{"role": "system", "content": ASK}, *row["prompt"]]
    text = ""
    for _ in range(3):
        reply = client.chat.completions.create(model="any", messages=messages)
        text = reply.choices[0].message.content or ""
        if number(text):
            break
        # What is added to the conversation goes on from its tokens; anything else would begin a
        # branch.
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Write the last line, too."},
        ]
    print(float(number(text) == number(row["answer"])))  # the last line: the reward
