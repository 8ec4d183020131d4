"""Graders: find the answer in a completion, and decide whether it is right.

answer.py         where the answer is in a completion
numbers.py        the number in an answer
choice.py         the letter of the option that a text chooses
units.py          the unit of measurement in an answer
math_check.py     whether two answers in mathematics are the same
arithmetic.py     the value of an expression with + - * /
instructions.py   whether a text follows an instruction of IFEval
instructions_text.py
                  words, sentences and the language of a text
sandbox.py        runs tests of a model's code in bubblewrap
sandbox_main.py   the program inside of the sandbox
sandbox_program.py
                  the program inside of it that runs another program
program_tests.py  whether a program prints what its tests expect
tested_names.py   which names of a model's code its tests may use
judge_model.py    a language model that grades completions

Nothing that a model wrote is evaluated outside of the sandbox.
"""
