"""An agent of verifiers 0.4: plays its tasksets, with the Python that has it.

VENV/bin/python verifiers_agent.py TASKSET > tasks.jsonl
shoal train model=Qwen/Qwen3-0.6B task=custom task.path=tasks.jsonl \\
    agent="VENV/bin/python verifiers_agent.py TASKSET"
"""

# pyright: reportMissingImports=false
import asyncio
import json
import os
import sys

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

# A plain conversation with the task's tools, in a process of this machine.
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


async def play(env, row, url):
    task_type = type(env.taskset).task_type()
    data = task_type.data_type().model_validate(row["task"])
    task = task_type(data, env.config.taskset.task)
    client = EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    context = ModelContext(client=client, model="shoal", sampling=SamplingConfig())
    async with env.serving():
        episode = await env.run_episode(task, context)
    if not episode.ok:
        errors = list(episode.errors) + [trace.errors for trace in episode.traces]
        sys.exit(f"the episode failed: {errors}")
    return episode.traces[0].reward


if __name__ == "__main__":
    env = load_environment(resolve_env_config({"taskset": {"id": sys.argv[1]}, "agent": AGENT}))
    if "OPENAI_BASE_URL" in os.environ:
        print(asyncio.run(play(env, json.load(sys.stdin), os.environ["OPENAI_BASE_URL"])))
    else:
        for task in env.taskset:
            data = task.data.model_dump(mode="json")
            prompt = [{"role": "user", "content": str(data["prompt"])}]
            print(json.dumps({"prompt": prompt, "task": data}))
