"""Does a model learn in a server of the package `openenv`?

    python benchmarks/openenv_game.py FOLDER [--steps 20]

Makes an environment of Python with openenv 0.10 in FOLDER, serves a game there (a number from 1 to
100, guessed in five questions), trains `tiny-tools` on it, and prints the rate of games won before
and after.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import random
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from pathlib import Path
from time import sleep

PORT, MOST = 8765, 8


def serve() -> None:
    """The game, in OpenEnv's classes; only openenv's own environment imports this."""
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        message: str

    class Heard(Observation):
        reply: str

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(
            self, seed: int | None = None, episode_id: str | None = None, **columns: object
        ) -> Heard:
            self.number, self._state = random.Random(seed).randint(1, 100), State(step_count=0)
            return Heard(reply="I think of a number from 1 to 100. What is it?", done=False)

        def step(self, action: Guess, timeout_s: float | None = None, **options: object) -> Heard:
            self._state.step_count += 1
            guess = int(action.message) if action.message.isdecimal() else None
            won = guess == self.number
            if won:
                said = "yes"
            elif guess is None:
                said = "no number"
            elif guess < self.number:
                said = "higher"
            else:
                said = "lower"
            return Heard(reply=said, reward=float(won), done=won or self._state.step_count == MOST)

        @property
        def state(self) -> State:
            return self._state

    # Annotations are text here: the framework reads the classes that it is given.
    uvicorn.run(
        create_fastapi_app(Game, Guess, Heard, max_concurrent_envs=1024),
        port=PORT,
        log_level="warning",
    )


def answers() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    python = given.folder / "bin" / "python"
    if not python.exists():
        venv.create(given.folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "openenv==0.10.0"], check=True)
    server = subprocess.Popen([python, __file__, "--serve"])
    try:
        while not answers():
            if server.poll() is not None:
                sys.exit("the server has ended")
            sleep(0.2)
        import shoal

        result = shoal.train(
            model="tiny-tools",
            task="environment",
            environment=f"openenv:http://127.0.0.1:{PORT}",
            steps=given.steps,
            batch={"prompts_per_step": 32, "group_size": 8},
            algorithm={"kl_coef": 0},
            optimizer={"lr": 1e-3},
            sampling={"max_prompt_tokens": 64, "max_completion_tokens": 192},
            task__num_eval_questions=100,
            environment__max_turns=MOST,
            train={"evaluate_every": 0},
        )
        before, after = (result[f"mean_reward_{when}"] for when in ("before", "after"))
        print(f"games won: {before:.1%} before, {after:.1%} after {given.steps} steps")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
