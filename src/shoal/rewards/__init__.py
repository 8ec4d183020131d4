"""Runs reward functions on completions.

loading.py            the function that `file.py:function` names
reward_call.py        one call of a function: its arguments, and how its result is read
pool.py               which calls are made, and in which worker process
scores.py             a group's rewards from the results of all functions; failures
ended_environment.py  environments after their rollouts, as reward functions get them

The built-in functions themselves are in `tasks/`.
"""
