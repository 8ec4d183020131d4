"""Tasks: questions to train on, held-out questions, rewards and graders.

To add a task, write a module with `load` and register it in `TASKS` of `task.py`.

    task.py             what a task is, and the table of all tasks
    custom.py           the task of a user's own rows
    words.py, gsm8k.py, ...
                        one module for each other task
    generated.py        for tasks that generate their problems
    splits.py           for tasks that read data: training rows and held-out rows
    data_folder.py      the files of a data set, in a folder or on the hub
    data_files.py       the rows of one file
    examples.py         a row as an `Example`, with its prompt checked
    template.py         a prompt from a row's columns
    builtin_rewards.py  reward functions that any task can use by name, `reward=NAME`
    graders/            whether an answer is right
"""
