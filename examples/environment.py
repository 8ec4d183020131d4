"""An environment with a state, a tool and a reward of its own: a safe to be opened.

shoal train model=Qwen/Qwen3-0.6B task=custom task.path=safes.jsonl \\
    environment=environment.py:Safe reward=environment.py:few_tries

A row of safes.jsonl: {"prompt": [{"role": "user", "content": "Open the safe."}], "code": 417}
"""


class Safe:
    def reset(self, code: int, **columns) -> str:
        """Begins a rollout with a row's columns; what it returns is appended to the user's
        message."""
        self.code = code
        self.tries = 0
        self.is_open = False
        return f" Its code has {len(str(code))} digits."

    def turn(self, code: int) -> str:
        """Turns the dial of the safe to a code.

        Args:
            code: The code that is tried.

        Returns:
            Whether the safe opens, or where the right code lies.
        """
        self.tries += 1
        self.is_open = code == self.code
        if self.is_open:
            return "open"
        return "higher" if code < self.code else "lower"

    def get_reward(self) -> float:
        """A reward of weight 1, named `Safe`."""
        return float(self.is_open)


def few_tries(environments, **columns):
    """A tenth for a safe that was opened at once, less for each further try."""
    rewards = []
    for safe in environments:
        rewards.append(0.1 / safe.tries if safe.is_open else 0.0)
    return rewards
