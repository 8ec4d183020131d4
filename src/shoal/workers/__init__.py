"""Supervised worker processes: a worker that exceeds its limit of time or memory is ended.

    process.py           what a forked process needs: a channel, limits, its own streams
    pool.py              calls of one handler in several workers: reward functions, math-verify
    sessions.py          calls of tools and environments, for many rollouts at a time
    environments.py      what a session's worker does: reset, call tools, read the reward
    rollout_function.py  a user's rollout function, as an environment

`rewards/` and `tasks/graders/` use pools, `rollout/` uses sessions.
"""
