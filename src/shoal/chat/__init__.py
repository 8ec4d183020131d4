"""Chat: the tokenizer, turns and tool calls as a chat template writes them, dialogues to learn
from."""
