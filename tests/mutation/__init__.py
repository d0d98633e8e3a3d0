"""Mutation testing of the core modules: change one thing, and some test must notice.

    pip install -e '.[dev,mutation]'
    python -m tests.mutation                  # every core module
    python -m tests.mutation optim meter      # these

What is changed is decided by mutmut's operators. Its own runner is not used: it starts a
process for each mutant, which would import torch each time (`warm` forks one that has).
"""
