"""A reward for short answers: 1 up to 6 words, and less the longer an answer is.

    shoal train model=HuggingFaceTB/SmolLM2-135M-Instruct task=custom \\
          task.path=examples/short_questions.jsonl reward=examples/brief.py:brief
"""

FULL = 6
"""Words of the longest answer that has the whole reward."""

NONE = 40
"""Words of the shortest answer that has no reward."""


def brief(completions, **_):
    """Returns for each completion 1.0 up to FULL words, falling in a line to 0.0 at NONE words. An
    empty answer has 0."""
    rewards = []
    for messages in completions:
        words = len(messages[0]["content"].split())
        share_left = (NONE - words) / (NONE - FULL)
        rewards.append(min(1.0, max(0.0, share_left)) if words else 0.0)
    return rewards
